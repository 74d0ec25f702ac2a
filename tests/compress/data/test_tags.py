"""Words with tags: files of columns, which lines are words, the schemes of tags, and which tags are no labels."""

from pathlib import Path

import pytest
from data_files import TOKENS, faults, lines_of, written

from compress.data.answer_rows import read_asked
from compress.data.columns import USUAL
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.splits import read_splits
from compress.data.tags import from_tags
from serve.errors import BadInput

Read = list[tuple[str, list[tuple[str, str]]]]


def read(tmp_path: Path, content: str, name: str = "train.conll") -> Read:
    """The text of each example of a file, with the words and the label of each entity."""
    return [
        (each.text, [(each.text[e.start : e.end], e.label) for e in each.entities or ()])
        for each in read_examples(written(tmp_path / name, content), TOKENS)
    ]


ANA: Read = [("ana in", [("ana", "x")]), ("in", [])]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # Columns end at tabs alone where lines have tabs, and else at blanks of ASCII.
        ("New York\tB-city\nis\tO\n", [("New York is", [("New York", "city")])]),
        ("10\u00a0000\tX\tB-sum\neuros\tX\tO\n", [("10\u00a0000 euros", [("10\u00a0000", "sum")])]),
        ("5\u00a0kg  B-sum\nde  O\n", [("5\u00a0kg de", [("5\u00a0kg", "sum")])]),
        ("Ms\t\tO\nKeller\tB-person\n", [("Ms Keller", [("Keller", "person")])]),  # tabs that align columns
        ("Ana \tB-name\t\r\nlives\tO\t\r\n", [("Ana lives", [("Ana", "name")])]),
        ("fly VB O\nto TO O\nNew NNP B-city\nYork NNP I-city\n", [("fly to New York", [("New York", "city")])]),
        # A document line ends a text and is in none.
        ("-DOCSTART- -X- O\nana N B-x\nin V O\n-DOCSTART- -X- O\n\nin A O\n", ANA),
        ("-DOCSTART-\nana N B-x\nin V O\n-DOCSTART-\n\nin A O\n", ANA),
        ("-DOCSTART- (1)\nana N B-x\nin V O\n-DOCSTART- (2)\n\nin A O\n", ANA),
        # Comments of published corpora.
        ("# id 1\tdomain=en\nana _ _ B-x\nin _ _ O\n\n\n# id 2\tdomain=en\nin _ _ O\n", ANA),
        ("# sent_id = 1\n# text = ana in\nana X Y B-x\nin X Y O\n\n# text = in\nin X Y O\n", ANA),
        ("#\thttps://example.org/1 [2009-10-17]\nana\tB-x\tO\nin\tO\tO\n\n# 2\nin\tO\tO\n", [("ana in", []), ("in", [])]),
        ("%% first of 2\nana B-x\nin O\n\n%% second\nin O\n", ANA),
        ("# NOTE\nana B-x\nin O\n\nin O\n", ANA),
        # A number sign with a tag is a word.
        ("#vote\tEVENT\nnow\tO\n", [("#vote now", [("#vote", "EVENT")])]),
        ("# NN B-tag\n1 CD I-tag\n\nwe PR O\n# NN O\n", [("# 1", [("# 1", "tag")]), ("we #", [])]),
        ("#home\tplace\nis\tO\n\nwe\tplace\n", [("#home is", [("#home", "place")]), ("we", [("we", "place")])]),
        ("# SYM\n1 CD\n\nitem NN\n# SYM\n", [("# 1", [("#", "SYM"), ("1", "CD")]), ("item #", [("item", "NN"), ("#", "SYM")])]),
        ("#\tsym\n1\tnum\n\nb\tnoun\n#\tsym\n", [("# 1", [("#", "sym"), ("1", "num")]), ("b #", [("b", "noun"), ("#", "sym")])]),
        ("# X SYM\n1 X CD\n", [("# 1", [("#", "SYM"), ("1", "CD")])]),
        ("item noun\n# sym\n2 num\n", [("item # 2", [("item", "noun"), ("#", "sym"), ("2", "num")])]),
        # One word alone, of another form than tags, is a comment.
        ("# 2\nitem NN\n1 CD\n", [("item 1", [("item", "NN"), ("1", "CD")])]),
        ("# intro\nitem NN\n1 CD\n", [("item 1", [("item", "NN"), ("1", "CD")])]),
        ("# ID 2\nitem NN\n1 CD\n", [("item 1", [("item", "NN"), ("1", "CD")])]),
        ("%% SECOND\nitem NN\n1 CD\n", [("item 1", [("item", "NN"), ("1", "CD")])]),
        ("# text = OK\nitem X Y NN\n1 X Y CD\n", [("item 1", [("item", "NN"), ("1", "CD")])]),
        # The last column has the tags, whatever is before it.
        ("Ana NN B-NP name\nlives VB B-VP O\n", [("Ana lives", [("Ana", "name")])]),
        ("Ana (NP*) NNP\nis * VB\n", [("Ana is", [("Ana", "NNP"), ("is", "VB")])]),
        ("Ana (PERSON*\nKovac *)\nis *\nOslo (GPE)\n", [("Ana Kovac is Oslo", [("Ana Kovac", "PERSON"), ("Oslo", "GPE")])]),
        ("Oslo (GPE*)\nNew (GPE*\nYork *\nCity *)\n", [("Oslo New York City", [("Oslo", "GPE"), ("New York City", "GPE")])]),
        ("Ana (PERSON)\nis *\n", [("Ana is", [("Ana", "PERSON")])]),
        # A first line with a tag names no columns.
        ("Word B-entity\nis O\n", [("Word is", [("Word", "entity")])]),
        ("Token O\nis O\n", [("Token is", [])]),
        ("text B-label\nis O\n", [("text is", [("text", "label")])]),
        ("Text NE\nist VB\nBonn NE\n", [("Text ist Bonn", [("Text", "NE"), ("ist", "VB"), ("Bonn", "NE")])]),
    ],
)  # fmt: skip
def test_files_of_columns(tmp_path: Path, content: str, expected: Read) -> None:
    assert read(tmp_path, content) == expected


@pytest.mark.parametrize(
    "header", ["Word Tag", "token\tlabel", "#Words\tNER Tag", '"word"\t"ner_label"', "FORM UPOS NER", "text X ENTITY"]
)
def test_a_line_that_names_the_columns_is_no_word(tmp_path: Path, header: str) -> None:
    blank = "\t" if "\t" in header else " "
    between = ["x"] * (header.count(" X ") + header.count("UPOS"))
    for tags in ("per O", "B-per O"):
        ana, here = (blank.join([word, *between, tag]) for word, tag in zip(("Ana", "here"), tags.split(), strict=True))
        # Two files that were joined.
        content = f"# by me\n-DOCSTART- O\n\n{header}\n{ana}\n{here}\n\n{header}\n{here}\n"
        assert read(tmp_path, content) == [("Ana here", [("Ana", "per")]), ("here", [])]


def test_columns_are_read_by_other_names_of_files_and_where_they_are_asked_about(tmp_path: Path) -> None:
    content, texts = "New York\tB-city\nis\tO\n\nAna\tO\n", ["New York is", "Ana"]
    for split in ("train", "validation", "test"):
        written(tmp_path / f"{split}.bio", content)
    assert [example.text for example in read_splits(str(tmp_path), TOKENS).train] == texts
    for file in (tmp_path / "test.bio", written(tmp_path / "asked.txt", content)):
        assert [each.text for each in read_asked(file, TOKENS, USUAL, "--input")] == texts
    plain = written(tmp_path / "asked.txt", "two words\nmore words\n")
    assert [each.text for each in read_asked(plain, TOKENS, USUAL, "--input")] == ["two words", "more words"]


def test_blanks_at_the_ends_of_an_entity_of_words_are_cut_off(tmp_path: Path) -> None:
    row = {"tokens": ["New", "York", " "], "tags": ["B-city", "I-city", "I-city"]}
    assert read(tmp_path, lines_of(row), "a.jsonl") == [("New York  ", [("New York", "city")])]


def test_words_that_a_tokenizer_cut_or_that_name_their_language_are_told_or_refused(tmp_path: Path) -> None:
    def notes(content: str) -> list[str]:
        said: list[str] = []
        read_examples(written(tmp_path / "train.conll", content), TOKENS, notes=said)
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
    with pytest.raises(BadInput, match="text of brat"):
        read(tmp_path, "Ana is here\n", "train.txt")


def rows(path: Path, *tags: str) -> Path:
    """A file with a row for each of `tags`, which stand with blanks between them."""
    return written(path, lines_of(*({"tokens": ["w"] * len(row.split()), "tags": row.split()} for row in tags)))


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        pytest.param(["B-x", "I-x", "B-x"], [(0, 3), (4, 5)], id="BIO"),
        pytest.param(["B-x", "E-x", "S-x"], [(0, 3), (4, 5)], id="BIOES"),
        pytest.param(["B-x", "L-x", "U-x"], [(0, 3), (4, 5)], id="BILOU"),
        pytest.param(["x", "x", "O"], [(0, 3)], id="IO"),
        pytest.param(["I-x", "O", "I-x"], [(0, 1), (4, 5)], id="I without its B"),
        pytest.param(["I-x", "E-x", "O"], [(0, 3)], id="I and E without their B"),
        pytest.param(["B-x", "I-y", "O"], [(0, 1), (2, 3)], id="I of another label"),
    ],
)
def test_every_tag_scheme_gives_its_spans(tags: list[str], spans: list[tuple[int, int]]) -> None:
    assert [(e.start, e.end) for e in from_tags(["a", "b", "c"], tags).entities or ()] == spans


# The tags of each row, the line of the only fault, and what it says; B_city is a label where no tag has a prefix.
TAGS: list[tuple[tuple[str, ...], int, str]] = [
    (("B-city I-city O", "O O", "O B_city", "B-city"), 3, "in 2 other rows tags have a prefix (write B-city)"),
    (("B-city I-city O", "O O", "O b-city", "B-city"), 3, "in 2 other rows tags have a prefix (write B-city)"),
    (("B-city I-city O", "O O", "O X-city", "B-city"), 3, "'X-city' without a prefix"),
    (("B-city I-city O", "O O", "O city", "B-city"), 3, "'city' without a prefix"),
    (("city O", "city person", "B-mail I-mail"), 3, "the label 'mail', but in 2 other rows tags have none"),
    (("O O", "B I O"), 2, "'B', a prefix without a label"),
    (("O O", "b i"), 2, "'b', a prefix without a label"),
    (("O O", "B E S O"), 2, "'B', a prefix without a label"),
    (("O O", "B O"), 2, "'B', a prefix without a label"),
    (("O O", "B-"), 2, "'B-', a prefix without a label"),
    (("O O", "B-x E-x B-x O"), 2, "'B-x' with no E-x to end its entity"),
    (("O O", "B-x L-x I-x O"), 2, "'I-x' with no L-x to end its entity"),
    (("O O", "S-x O U-x"), 2, "tags with S, U"),
    (("O O", "B-x o"), 2, "capital letter O"),
    (("O O", "B-x I-x X-x"), 2, "'X-x' among others with a prefix"),
    (("B-x E-x", "S-x O", "B-x O", "O O"), 3, "without an E- or S- tag, unlike 2 other rows"),
    (("B-x I-x", "B-y O", "O S-x"), 3, "an E-, S-, L- or U- tag, unlike entities in 2 other rows"),
]


@pytest.mark.parametrize(
    ("tags", "line", "says"), TAGS, ids=lambda each: " | ".join(each) if isinstance(each, tuple) else ""
)
def test_a_row_of_another_tag_scheme_is_a_fault(tmp_path: Path, tags: tuple[str, ...], line: int, says: str) -> None:
    ((found, reason),) = faults(rows(tmp_path / "train.jsonl", *tags), TOKENS)
    assert (found, says in reason) == (line, True), reason


@pytest.mark.parametrize(
    ("tags", "write"),
    [
        (("B_city I_city", "O B_person"), ""),
        (("b-city i-city", "O b-city"), ""),
        (("b:city O",), ""),
        (("city-B city-I", "O name-B"), ""),
        (("city_b O",), ""),
        (("B_city I_city person", "B_city O"), ""),
        (("I_x O I_y",), "(write I-x)"),
        (("i-x O", "i-y"), "(write I-x)"),
        (("x-B x-M x-E", "y-S"), "(write B-x)"),
        (("B–x I–x O",), "(write B-x)"),
        (("BX IX O",), "(write B-X)"),
    ],
)
def test_misspelt_prefixes_are_faults_of_every_row(tmp_path: Path, tags: tuple[str, ...], write: str) -> None:
    found = faults(rows(tmp_path / "train.jsonl", *tags, "O O"), TOKENS)
    assert [line for line, _ in found] == [*range(1, len(tags) + 1)]
    assert all("a prefix in another spelling" in reason for _, reason in found)
    assert any(write in reason for _, reason in found)


@pytest.mark.parametrize(
    ("tags", "write"),
    [
        (("B-x M-x E-x", "S-y O"), "'M-x' among others with a prefix, such as 'B-x' (write I-x)"),
        (("B-x I-x", "W-y"), "(write S-y)"),
        (("B-x C-x O",), "(write I-x inside an entity)"),
        (("B-x O-x",), "(write O)"),
    ],
)
def test_other_schemes_are_told_what_to_write(tmp_path: Path, tags: tuple[str, ...], write: str) -> None:
    assert any(write in reason for _, reason in faults(rows(tmp_path / "train.jsonl", *tags), TOKENS))


@pytest.mark.parametrize(
    "tags",
    [
        ("city O", "city person", "E-mail E-mail"),
        ("NAME E-MAIL", "O E-MAIL"),
        ("DNA", "RNA O", "O B-cell"),
        ("E-MAIL", "I-PHONE O"),
        ("O T-cell", "cell-line O"),
        ("BANK O", "BIRD"),
        ("i-phone O",),
        ("e-mail", "i-phone"),
        ("type-I", "grade-I O"),
        ("a|b", "O,b", "R/D O"),
    ],
)
def test_labels_that_look_like_tags_are_names(tmp_path: Path, tags: tuple[str, ...]) -> None:
    found = read_examples(rows(tmp_path / "train.jsonl", *tags), TOKENS)
    assert {entity.label for each in found for entity in each.entities or ()} == {*" ".join(tags).split()} - {"O"}
    assert all(len(each.entities or ()) == len({*row.split()} - {"O"}) for each, row in zip(found, tags, strict=True))


def test_tags_are_judged_by_those_of_all_splits(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        rows(tmp_path / f"{name}.jsonl", "NAME O" if name == "test" else "O L-SHAPE", "O S-BAHN")
    assert read_splits(str(tmp_path), TOKENS).labels(TOKENS) == ("L-SHAPE", "S-BAHN")
    for name, tag in (("train", "B-city"), ("validation", "B_city"), ("test", "B-city")):
        rows(tmp_path / f"{name}.jsonl", f"{tag} O", "O B-city")
    with pytest.raises(BadRows, match=r"validation\.jsonl, line 1: .*'B_city' .* in 5 other rows") as caught:
        read_splits(str(tmp_path), TOKENS)
    assert len(caught.value.faults) == 1
