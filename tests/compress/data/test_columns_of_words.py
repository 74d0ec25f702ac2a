"""Files of words and tags in columns: what separates columns, where texts end, which lines are comments, which column holds tags."""

from pathlib import Path

import pytest

from compress.data.answer_rows import read_asked
from compress.data.columns import USUAL
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.splits import read_splits
from compress.tasks import TOKEN_CLASSIFICATION
from serve.errors import BadInput


def read(tmp_path: Path, content: str, name: str = "train.conll") -> list[tuple[str, list[tuple[str, str]]]]:
    """The text of each example of a file, with the words and the label of each entity."""
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    return [
        (each.text, [(each.text[e.start : e.end], e.label) for e in each.entities or ()])
        for each in read_examples(tmp_path / name, TOKEN_CLASSIFICATION)
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("New York\tB-city\nis\tO\n", ("New York is", [("New York", "city")])),
        ("10\u00a0000\tX\tB-sum\neuros\tX\tO\n", ("10\u00a0000 euros", [("10\u00a0000", "sum")])),
        ("5\u00a0kg  B-sum\nde  O\n", ("5\u00a0kg de", [("5\u00a0kg", "sum")])),
        ("Ms\t\tO\nKeller\tB-person\n", ("Ms Keller", [("Keller", "person")])),  # tabs that align columns
        ("Ana \tB-name\t\r\nlives\tO\t\r\n", ("Ana lives", [("Ana", "name")])),
    ],
)
def test_columns_end_at_tabs_alone_where_lines_have_tabs_and_else_at_blanks_of_ascii(
    tmp_path: Path, content: str, expected: tuple[str, list[tuple[str, str]]]
) -> None:
    assert read(tmp_path, content) == [expected]


def test_a_document_line_ends_a_text_and_is_in_none(tmp_path: Path) -> None:
    for line in ("-DOCSTART- -X- O", "-DOCSTART-", "-DOCSTART- (1)"):
        content = f"{line}\nAna N B-name\n{line}\n\nOslo N B-city\nis V O\n{line}\nnow A O\n"
        assert [text for text, _ in read(tmp_path, content)] == ["Ana", "Oslo is", "now"]


@pytest.mark.parametrize(
    "content",
    [
        "# id 1\tdomain=en\nana _ _ B-x\nin _ _ O\n\n\n# id 2\tdomain=en\nin _ _ O\n",
        "# sent_id = 1\n# text = ana in\nana X Y B-x\nin X Y O\n\n# text = in\nin X Y O\n",
        "#\thttps://example.org/1 [2009-10-17]\nana\tB-x\tO\nin\tO\tO\n\n# 2\nin\tO\tO\n",
        "%% first of 2\nana B-x\nin O\n\n%% second\nin O\n",
    ],
)
def test_comments_of_published_corpora_are_in_no_text(tmp_path: Path, content: str) -> None:
    assert [text for text, _ in read(tmp_path, content)] == ["ana in", "in"]


def test_a_number_sign_with_its_tag_is_a_word(tmp_path: Path) -> None:
    assert read(tmp_path, "#vote\tEVENT\nnow\tO\n") == [("#vote now", [("#vote", "EVENT")])]
    assert read(tmp_path, "# NN B-tag\n1 CD I-tag\n\nwe PR O\n# NN O\n") == [("# 1", [("# 1", "tag")]), ("we #", [])]
    assert read(tmp_path, "#home\tplace\nis\tO\n\nwe\tplace\n") == [
        ("#home is", [("#home", "place")]),
        ("we", [("we", "place")]),
    ]


def test_a_number_sign_is_a_word_where_tags_have_no_prefix(tmp_path: Path) -> None:
    for content in ("# SYM\n1 CD\n\nitem NN\n# SYM\n2 CD\n", "#\tsym\n1\tnum\n\nitem\tnoun\n#\tsym\n2\tnum\n"):
        assert [text for text, _ in read(tmp_path, content)] == ["# 1", "item # 2"]
    assert [text for text, _ in read(tmp_path, "item noun\n# sym\n2 num\n")] == ["item # 2"]
    assert [text for text, _ in read(tmp_path, "# X SYM\n1 X CD\n")] == ["# 1"]
    for comment in ("# 2", "# intro", "# ID 2", "%% SECOND"):  # one word alone, of another form than tags
        assert [text for text, _ in read(tmp_path, f"{comment}\nitem NN\n1 CD\n")] == ["item 1"]
    assert [text for text, _ in read(tmp_path, "# text = OK\nitem X Y NN\n1 X Y CD\n")] == ["item 1"]
    assert [text for text, _ in read(tmp_path, "# NOTE\nAna B-x\nis O\n")] == ["Ana is"]


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("New York B-city\nis O\nbig O\n", 1, "has 3 columns, and most lines of the file have 2; a word that holds a blank needs tabs"),
        ("Ana\tN\tB-x\nlives\tO\nhere\tA\tO\n", 2, "has 2 columns, and most lines of the file have 3"),
        ("Ana\tB-x\nlives\nhere\tO\n", 2, "has one column ('lives'); a token and its tag are needed; columns are separated by tabs"),
        ("Ana\tB-x\n \tO\n", 2, "has no word in its first column"),
        ("Ana B-x\n# a note\nhere O\n", 2, "begins with '#' like a comment, and is between words"),
        ("Ana B-x\rhere O\r", 1, "carriage return"),
        ("1\tAna\tB-x\n2\tlives\tO\n\n1\tHere\tO\n", None, "has numbers in its first column, and no words"),
        ("7 Ana B-x\n7 lives O\n\n8 Here O\n", None, "has numbers in its first column, and no words"),
        ("B-x Ana\nO lives\n", None, "no tag in its last column, which holds 'Ana', and tags in column 1 of 2"),
        ("Ana B-x +\nlives O -\n", None, "no tag in its last column, which holds '+', and tags in column 2 of 3"),
        ("Ana x NN\nlives O VB\n", None, "no tag in its last column, which holds 'NN', and tags in column 2 of 3"),
        ("Ana B\nlives O\n", 1, "has the tag 'B', a prefix without a label"),
    ],
)  # fmt: skip
def test_lines_that_are_not_in_columns_of_words_and_tags_are_named(
    tmp_path: Path, content: str, line: int | None, says: str
) -> None:
    with pytest.raises(BadRows) as caught:
        read(tmp_path, content)
    ((found, reason),) = [(fault.line, fault.reason) for fault in caught.value.faults]
    assert (found, says in reason) == (line, True), reason


def test_tags_in_the_last_column_are_read_whatever_is_before_them(tmp_path: Path) -> None:
    assert read(tmp_path, "Ana NN B-NP name\nlives VB B-VP O\n") == [("Ana lives", [("Ana", "name")])]


def test_columns_are_read_by_other_names_of_files_and_where_they_are_asked_about(tmp_path: Path) -> None:
    content = "New York\tB-city\nis\tO\n\nAna\tO\n"
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.bio").write_text(content, encoding="utf-8")
    assert [example.text for example in read_splits(str(tmp_path), TOKEN_CLASSIFICATION).train] == [
        "New York is",
        "Ana",
    ]
    (tmp_path / "asked.txt").write_text(content, encoding="utf-8")
    for file in ("asked.txt", "test.bio"):
        assert [each.text for each in read_asked(tmp_path / file, TOKEN_CLASSIFICATION, USUAL, "--input")] == [
            "New York is",
            "Ana",
        ]
    (tmp_path / "asked.txt").write_text("two words\nmore words\n", encoding="utf-8")
    assert [each.text for each in read_asked(tmp_path / "asked.txt", TOKEN_CLASSIFICATION, USUAL, "--input")] == [
        "two words",
        "more words",
    ]


def test_spans_in_brackets_are_read_from_the_last_column(tmp_path: Path) -> None:
    content = "Ana (PERSON*\nKovac *)\nis *\nin *\nOslo (GPE)\n\nOslo (GPE*)\nNew (GPE*\nYork *\nCity *)\n"
    assert read(tmp_path, content) == [
        ("Ana Kovac is in Oslo", [("Ana Kovac", "PERSON"), ("Oslo", "GPE")]),
        ("Oslo New York City", [("Oslo", "GPE"), ("New York City", "GPE")]),
    ]
    assert read(tmp_path, "Ana (PERSON)\nis *\n") == [("Ana is", [("Ana", "PERSON")])]


def test_brackets_before_a_column_of_names_are_no_fault(tmp_path: Path) -> None:
    assert read(tmp_path, "Ana (NP*) NNP\nis * VB\n") == [("Ana is", [("Ana", "NNP"), ("is", "VB")])]


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        ("Ana (S(NP*\nis *\n", 1, "has '(S(NP*' in its last column, and a span cannot be within another"),
        ("Ana (NP*\nis (VP*)\nit *)\n", 2, "has '(VP*)' in its last column, and a span cannot be within another"),
        ("Ana (NP*)\nis *)\n", 2, "has '*)' in its last column, and no span is open there"),
        ("Ana (NP*\nis *\n\n", 1, "has a text whose last span (NP*) is not closed"),
        (
            "bc/1 0 0 Ana NNP (TOP(NP* - - - - (PERSON) (ARG0*) (1)\nbc/1 0 1 is VB (VP*)) - - - - * (V*) -\n",
            None,
            "has spans in brackets such as '(PERSON)' in column 11 of 13, and '(1)' in its last; put the words into the first column, "
            "and their tags into the last",
        ),
    ],
)
def test_brackets_that_are_no_spans_of_words_are_faults(
    tmp_path: Path, content: str, line: int | None, said: str
) -> None:
    with pytest.raises(BadRows) as caught:
        read(tmp_path, content)
    assert [(fault.line, said in fault.reason) for fault in caught.value.faults] == [(line, True)], caught.value


def test_an_entity_of_blanks_is_a_fault_and_blanks_at_its_ends_are_cut_off(tmp_path: Path) -> None:
    def row(tokens: str, tags: str) -> str:
        return f'{{"tokens": {tokens}, "tags": {tags}}}\n'

    assert read(tmp_path, row('["New", "York", " "]', '["B-city", "I-city", "I-city"]'), "a.jsonl") == [
        ("New York  ", [("New York", "city")])
    ]
    for tokens in ('["in", " "]', '["in", "\\u00a0"]'):
        with pytest.raises(BadRows, match="an entity city of `tokens` that hold only blanks"):
            read(tmp_path, row(tokens, '["O", "B-city"]'), "a.jsonl")


def test_two_lists_of_words_under_other_names_are_told_by_the_flags_that_read_them(tmp_path: Path) -> None:
    for words, tags in (("words", "labels"), ("text", "label"), ("sentence", "ner")):
        with pytest.raises(BadRows, match=f"--tokens-column {words} --tags-column {tags}"):
            read(tmp_path, f'{{"{words}": ["Ana", "is"], "{tags}": ["B-x", "O"]}}\n', "a.jsonl")


@pytest.mark.parametrize(
    "header", ["Word Tag", "token\tlabel", "#Words\tNER Tag", '"word"\t"ner_label"', "FORM UPOS NER", "text X ENTITY"]
)
def test_a_line_that_names_the_columns_is_no_word(tmp_path: Path, header: str) -> None:
    blank = "\t" if "\t" in header else " "
    for tags in ("per O", "B-per O"):
        ana, here = (blank.join([word, *["x"] * header.count(" X "), *["x"] * header.count("UPOS"), tag])
                     for word, tag in zip(("Ana", "here"), tags.split(), strict=True))  # fmt: skip
        content = (
            f"# by me\n-DOCSTART- O\n\n{header}\n{ana}\n{here}\n\n{header}\n{here}\n"  # of two files that were joined
        )
        assert read(tmp_path, content) == [("Ana here", [("Ana", "per")]), ("here", [])]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("Sentence #\tWord\tPOS\tTag", "words are in column 2 (word) of 4 and tags in column 4 (tag)"),
        ("Sentence\tWord\tTag", "words are in column 2 (word) of 3"),
        ("Tag\tWord", "words are in column 2 (word) of 2 and tags in column 1 (tag)"),
        ("word\tner\tpos\tlemma", "words are in column 1 (word) of 4 and tags in column 2 (ner)"),
    ],
)
def test_a_header_that_puts_words_or_tags_elsewhere_is_a_fault(tmp_path: Path, header: str, says: str) -> None:
    with pytest.raises(BadRows) as caught:
        read(tmp_path, f"{header}\nSentence: 1\tAna\tN\tB-per\n\tis\tV\tO\n")
    assert [says in fault.reason for fault in caught.value.faults] == [True], caught.value


def test_words_that_a_tokenizer_cut_or_that_name_their_language_are_told_or_refused(tmp_path: Path) -> None:
    def notes(content: str) -> list[str]:
        (tmp_path / "train.conll").write_text(content, encoding="utf-8")
        said: list[str] = []
        read_examples(tmp_path / "train.conll", TOKEN_CLASSIFICATION, notes=said)
        return said

    assert notes("en:dash B-x\nis O\n## O\n") == []  # not all words of the text, and no piece
    for content, told in (
        ("Kel B-x\n##ler I-x\nis O\n", "1 of 3 words that are pieces or signs of a tokenizer"),
        ("[CLS] O\nAna B-x\nis O\n", "such as '[CLS]'"),
        ("Ana B-x\n@@ O\nKe@@ O\n", "1 of 3 words that are pieces"),
        ("Ana B-x\nis O\n\nde:in O\n", "1 of 3 words that begin with a language"),
    ):
        (said,) = notes(content)
        assert told in said
    for content in ("▁Kel B-x\nler I-x\n▁is O\n", "zh-classical:Ana B-x\nzh-classical:is O\nin O\n"):
        with pytest.raises(BadRows, match=r"has [23] of 3 words that"):
            notes(content)


def test_a_text_of_brat_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "train.ann").write_text("T1\tper 0 3\tAna\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"text of brat.* Write a line"):
        read(tmp_path, "Ana is here\n", "train.txt")


def test_a_first_line_with_a_tag_names_no_columns(tmp_path: Path) -> None:
    for line in ("Word B-entity", "Token O", "text B-label"):
        assert read(tmp_path, f"{line}\nis O\n")[0][0] == f"{line.split()[0]} is"


def test_a_first_line_that_ends_in_a_tag_of_the_file_is_a_word(tmp_path: Path) -> None:
    assert read(tmp_path, "Text NE\nMünchen NE\nist VB\n")[0][0] == "Text München ist"
