import itertools
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from serve.text.labels import bio_tags
from serve.text.spans import decode_spans, tag_runs, words

TAGS = bio_tags(["city", "name"])
PARTS = ("HANGUL JUNGSEONG", "HANGUL JONGSEONG")


def wordpiece() -> Tokenizer:
    """Uncased, accents stripped, every letter a piece: as many word pieces as there can be."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789", *"東京は"]
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def byte_level() -> Tokenizer:
    """Every byte a token, leading spaces inside words' offsets: an emoji becomes four tokens over one character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, trim_offsets=False)
    return tokenizer


def nfkc_metaspace() -> Tokenizer:
    """Compatibility forms taken apart (`½` becomes three characters), as sentence-piece models do."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), *((character, -2.0) for character in "abcxyz0123456789⁄kg㎏é")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    return tokenizer


TOKENIZERS = {"wordpiece": wordpiece(), "byte-level": byte_level(), "nfkc-metaspace": nfkc_metaspace()}
AWKWARD = [
    "I fly to Zürich 😀 now",
    "👨‍👩‍👧 in Cafe\u0301 Rome\r\n\tOslo",
    "tel １２３ ½kg ㎏ ﬁne",
    "\u0301starts with a mark",
    "東京は Roma e\u0301\u0302\u0303x",
    " \t\r\n ",
    "",
    "a\u200db\u00a0c\u3000d\ufeff",
    "שָׁלוֹם नमस्ते สวัสดี",
]
awkward_texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="ab 😀é\u0301\u0327\t\r\n１½ﬁ㎏東京は-_'\u200d🇫🇷👍🏽", max_size=40),
    st.sampled_from(AWKWARD),
)


def found_words(text: str, tokenizer: str = "wordpiece") -> list[str]:
    encoding = TOKENIZERS[tokenizer].encode(text)
    return [text[word.start : word.end] for word in words(text, encoding.offsets, encoding.word_ids)]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=75, deadline=None)
@given(text=awkward_texts, seed=st.integers(0, 2**32 - 1))
@example(text="A\r\u200c", seed=0)
@example(text=AWKWARD[1], seed=3)
def test_spans_lie_in_the_text_in_order_without_overlap(tokenizer: str, text: str, seed: int) -> None:
    encoding = TOKENIZERS[tokenizer].encode(text)
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(len(TAGS)) / 2, size=len(encoding))

    spans = decode_spans(words(text, encoding.offsets, encoding.word_ids), probabilities, TAGS)

    position = 0
    for span in spans:
        assert position <= span.start < span.end <= len(text)
        assert text[span.start : span.end] == text[span.start : span.end].strip()
        assert span.label in {"city", "name"}
        assert 0.0 <= span.score <= 1.0 + 1e-12
        # No combining mark is cut from the character that carries it.
        assert span.end == len(text) or not unicodedata.category(text[span.end]).startswith("M")
        position = span.end


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=75, deadline=None)
@given(text=awkward_texts)
def test_words_are_in_order_and_apart(tokenizer: str, text: str) -> None:
    encoding = TOKENIZERS[tokenizer].encode(text)
    found = words(text, encoding.offsets, encoding.word_ids)

    assert all(before.end <= after.start for before, after in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fly to Rome", ["fly", "to", "Rome"]),
        ("Zürich 2nd_floor", ["Zürich", "2nd", "_", "floor"]),
        ("Cafe\u0301 Rome", ["Cafe\u0301", "Rome"]),
        ("don't", ["don", "'", "t"]),
        ("東京は", ["東", "京", "は"]),
        ("１２３", ["１２３"]),
        ("a\r\n\tb", ["a", "b"]),
        ("", []),
    ],
)
def test_words_of_a_wordpiece_tokenizer(text: str, expected: list[str]) -> None:
    assert found_words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fly to Rome", ["fly", "to", "Rome"]),
        ("Zürich 😀 é", ["Zürich", "😀", "é"]),
        ("Cafe\u0301 now", ["Cafe\u0301", "now"]),
        ("東京", ["東", "京"]),
        ("(Rome)", ["(", "Rome", ")"]),
    ],
)
def test_words_of_a_byte_level_tokenizer_are_the_same(text: str, expected: list[str]) -> None:
    assert found_words(text, "byte-level") == expected


@pytest.mark.parametrize("by", ["composed", "letters", "bytes", "wordpiece"])
@pytest.mark.parametrize("text", ["moved to 서울 , 한국 .", "ガギ パン", "값이 닭 (외곬)", "ന്\u200d ന"])
def test_a_word_ends_with_the_last_code_point_of_its_last_letter(text: str, by: str) -> None:
    # In a decomposed text each syllable has two or three code points, and in half width a voiced Katakana two.
    text = unicodedata.normalize("NFD", text) if "パ" not in text else "ｶﾞｷﾞ ﾊﾟﾝ"
    signs = dict.fromkeys(unicodedata.normalize("NFKC", text) + text)
    tokenizer = (
        byte_level() if by == "bytes" else Tokenizer(models.Unigram([("?", 0.0), *((c, -2.0) for c in signs)], 0))
    )
    if by == "wordpiece":
        pieces = [*signs, *(f"##{sign}" for sign in signs)]
        tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(["[UNK]", *pieces])}))
    if by != "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        form = normalizers.NFD() if by == "letters" else normalizers.NFKC()
        tokenizer.normalizer = normalizers.Sequence([form, normalizers.Replace("\u200d", "")])
    encoding = tokenizer.encode(text)
    ends = {word.end for word in words(text, encoding.offsets, encoding.word_ids)}
    assert ends >= {place for place, sign in enumerate(text + " ") if sign == " " and place and text[place - 1] != " "}
    assert not any(
        text[end : end + 1] in "ﾞﾟ" or unicodedata.name(text[end : end + 1] or " ").startswith(PARTS)
        for end in ends
        if end < len(text)
    )


@pytest.mark.parametrize("by", ["bytes", "punctuation", "blanks", "without accents"])
@pytest.mark.parametrize(
    "text_words",
    [
        ["क्षत्रिय", "दिल्ली", "में"],  # vowel signs, and consonants that a virama joins
        ["น้ำ", "ກຳ"],  # a vowel that is a letter by its category, and a part of one by UAX 29
        ["می\u200cخواهم", "مَدْرَسَة", "שָׁלוֹם"],
        ["cafe\u0301s", "തമിഴ്\u200d"],
        ["မား"],  # vowels that UAX 29 leaves apart, in a script without blanks
        ["👩\u200d💻", "👍🏽", "🇩🇪", "1\ufe0f\u20e3"],
    ],
)
def test_words_hold_whole_letters_whatever_the_tokenizer_divides(text_words: list[str], by: str) -> None:
    text = " ".join(text_words)
    if by == "bytes":  # GPT-2's pattern divides letters from marks, and bytes divide emoji
        tokenizer = byte_level()
    else:
        tokenizer = Tokenizer(models.Unigram([("?", 0.0), ("▁", -1.0), *((c, -2.0) for c in dict.fromkeys(text))], 0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace() if by == "blanks" else pre_tokenizers.BertPreTokenizer()
        if by == "without accents":
            tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=True)
    encoding = tokenizer.encode(text)
    assert [text[word.start : word.end] for word in words(text, encoding.offsets, encoding.word_ids)] == text_words


def test_no_word_ends_in_a_blank_that_is_a_part_of_a_sign() -> None:
    assert found_words("a \u06dd b", "byte-level") == ["a", "\u06dd", "b"]


@pytest.mark.parametrize("text", ["a\u200d b", "a \u200cb"])
def test_a_joiner_that_joins_nothing_is_in_no_word(text: str) -> None:
    assert found_words(text, "byte-level") == ["a", "b"]


def test_one_character_that_becomes_three_pieces_is_one_word() -> None:
    assert found_words("a ½ b", "nfkc-metaspace") == ["a", "½", "b"]


def test_a_words_tag_is_its_first_tokens_tag_and_the_score_is_the_mean_over_words() -> None:
    text = "ab c"
    encoding = TOKENIZERS["wordpiece"].encode(text)  # [CLS] a ##b c [SEP]
    tags = ["O", "B-city", "I-city"]
    probabilities = np.array([[0, 1, 0], [0.1, 0.9, 0], [1, 0, 0], [0.2, 0.1, 0.7], [0, 1, 0]])

    (span,) = decode_spans(words(text, encoding.offsets, encoding.word_ids), probabilities, tags)

    assert span[:3] == (0, 4, "city")
    assert span.score == pytest.approx(0.8)


def test_nothing_but_special_tokens_has_no_spans() -> None:
    encoding = TOKENIZERS["wordpiece"].encode("")
    assert decode_spans(words("", encoding.offsets, encoding.word_ids), np.eye(3)[[1, 1]], ["O", "B-a", "I-a"]) == []


@pytest.mark.parametrize(
    ("tags", "runs"),
    [
        (["B-a", "I-a", "B-a"], [(0, 1, "a"), (2, 2, "a")]),
        (["I-a", "I-a", "I-b"], [(0, 1, "a"), (2, 2, "b")]),
        (["B-a", "E-a", "I-a"], [(0, 1, "a"), (2, 2, "a")]),
        (["E-a", "E-a"], [(0, 0, "a"), (1, 1, "a")]),
        (["S-a", "S-a", "I-a"], [(0, 0, "a"), (1, 1, "a"), (2, 2, "a")]),
        (["B-a", "L-a", "U-b"], [(0, 1, "a"), (2, 2, "b")]),
        (["a", "a", "O", "b"], [(0, 1, "a"), (3, 3, "b")]),
    ],
    ids=["bio", "orphan-i-begins", "e-ends", "e-alone", "s-is-alone", "bilou", "io"],
)
def test_runs_of_tags(tags: list[str], runs: list[tuple[int, int, str]]) -> None:
    assert tag_runs(tags) == runs


@settings(max_examples=200, deadline=None)
@given(tags=st.lists(st.sampled_from(["O", *(f"{prefix}-{label}" for prefix in "BIES" for label in ("a", "b"))])))
def test_runs_agree_with_seqeval(tags: list[str]) -> None:
    # seqeval's default mode is the CoNLL-2000 evaluation script's reading of tags.
    theirs = [(first, last, label) for label, first, last in get_entities(tags)]
    assert tag_runs(tags) == theirs
