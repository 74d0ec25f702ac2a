"""A teacher's answers from a file: read, refused, and carried to the words of another tokenizer."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import ROOT
from small_task import write_rows
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from compress.data.align_labels import WordAnswer, align_labels
from compress.data.columns import Columns
from compress.data.encoded import Encoded
from compress.data.examples import Entity, Example
from compress.data.row_fields import BadRows
from compress.data.task import Task
from compress.data.teacher_labels import CachedLabels, TeacherLabels, read_teacher_labels, word_logits
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from serve.errors import BadInput
from serve.text.answers import softmax
from serve.text.labels import bio_tags
from serve.text.spans import words
from serve.text.tokenizer import load_tokenizer

CLASSES, TAGS = ("praise", "refund", "status"), bio_tags(["city", "item"])


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder, 64)


def read(tmp_path: Path, rows: list[dict[str, Any]], task: Task = TEXT_CLASSIFICATION) -> TeacherLabels:
    return read_teacher_labels([write_rows(tmp_path / "answers.jsonl", rows)], task)


def probabilities(
    tokenizer: Tokenizer, teacher: TeacherLabels, texts: Sequence[Example], *, multi_label: bool = False
) -> list[np.ndarray | None]:
    labels = CLASSES if teacher.task == TEXT_CLASSIFICATION else TAGS
    encoded = teacher.task.with_multi_label(multi_label).encode(texts, tokenizer, labels)
    found = teacher.logits(encoded, texts)
    if multi_label:
        return [None if logits is None else 1 / (1 + np.exp(-logits.astype(np.float64))) for logits in found]
    return [None if logits is None else softmax(logits.astype(np.float64)) for logits in found]


def test_missing_probability_is_shared_by_the_other_labels(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"text": "whole", "labels": {"refund": 0.7, "praise": 0.2, "status": 0.1}},
        {"text": "part", "labels": {"refund": 0.7}},
        {"text": "hard", "label": "status"},
        {"text": "none"},
    ]
    found = probabilities(tokenizer, read(tmp_path, rows), [Example(row["text"]) for row in [*rows, {"text": "new"}]])
    expected = [[0.2, 0.7, 0.1], [0.15, 0.7, 0.15], [0.0, 0.0, 1.0]]
    np.testing.assert_allclose(np.concatenate([each for each in found[:3] if each is not None]), expected, atol=1e-6)
    assert found[3:] == [None, None]


def test_unnamed_labels_of_a_multi_label_text_do_not_apply(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"text": "soft", "labels": {"refund": 0.7, "status": 0.6}}, {"text": "hard", "label": ["praise"]}]
    teacher = read(tmp_path, rows)
    teacher.check_labels(CLASSES, multi_label=True)
    texts = [Example("soft"), Example("hard")]
    found = probabilities(tokenizer, teacher, texts, multi_label=True)
    np.testing.assert_allclose(
        np.concatenate([each for each in found if each is not None]), [[0, 0.7, 0.6], [1, 0, 0]], atol=1e-6
    )
    assert [each.label for each in teacher.examples(multi_label=True)] == [("refund", "status"), ("praise",)]


def test_entities_give_their_words_their_score_and_the_rest_to_outside(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"text": "lamp from new york", "entities": [
        {"start": 0, "end": 4, "label": "item"}, {"start": 10, "end": 18, "label": "city", "score": 0.75},
    ]}  # fmt: skip
    (found,) = probabilities(tokenizer, read(tmp_path, [row], TOKEN_CLASSIFICATION), [Example(row["text"])])
    assert found is not None
    by_tag = [{tag: round(float(p), 4) for tag, p in zip(TAGS, line, strict=True) if p > 1e-3} for line in found]
    assert by_tag == [{"B-item": 1}, {"O": 1}, {"B-city": 0.75, "O": 0.25}, {"I-city": 0.75, "O": 0.25}]


@pytest.mark.parametrize(
    ("places", "given", "expected"),
    [
        # One word of the teacher's is two of the student's: the entity goes on.
        ([(0, 3), (3, 4), (4, 8)], [(0, 8, "B-city")], ["B-city", "I-city", "I-city"]),
        # Two of the teacher's are one of the student's: the one with most characters counts, of equals the first.
        ([(0, 4)], [(0, 1, "O"), (1, 4, "B-city")], ["B-city"]),
        ([(0, 4)], [(0, 2, "B-city"), (2, 4, "O")], ["B-city"]),
        # Other schemes: I alone, and single words and ends.
        ([(0, 3), (4, 7), (8, 9)], [(0, 3, "I-city"), (4, 7, "I-city"), (8, 9, "I-item")], ["B-city", "I-city", "B-item"]),
        ([(0, 3), (4, 7), (8, 9)], [(0, 3, "S-city"), (4, 7, "B-item"), (8, 9, "E-item")], ["B-city", "B-item", "I-item"]),
        # A word that the teacher's tokenizer drops is inside an entity that goes on behind it, and otherwise outside.
        ([(0, 3), (4, 5), (6, 9)], [(0, 3, "B-city"), (6, 9, "I-city")], ["B-city", "I-city", "I-city"]),
        ([(0, 3), (4, 5), (6, 9)], [(0, 3, "B-city"), (6, 9, "B-city")], ["B-city", "O", "B-city"]),
        # The teacher did not read to the end.
        ([(0, 3), (4, 7)], [(0, 3, "B-city")], None),
        ([], [], []),
    ],
)  # fmt: skip
def test_tags_are_aligned_by_characters(
    places: list[tuple[int, int]], given: list[tuple[int, int, str]], expected: list[str] | None
) -> None:
    carried = align_labels(places, [WordAnswer(start, end, {tag: 1.0}) for start, end, tag in given])
    if expected is None:
        assert carried is None
        return
    assert carried is not None
    likeliest = [max(tags, key=lambda tag: tags[tag]) for tags in carried]
    assert [prefix if prefix == "O" else f"{prefix}-{label}" for prefix, label in likeliest] == expected


def test_all_probabilities_of_a_word_are_aligned(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"text": "new-york", "words": [{"start": 0, "end": 8, "tags": {"B-city": 0.6, "I-item": 0.1, "O": 0.3}}]}
    (found,) = probabilities(tokenizer, read(tmp_path, [row], TOKEN_CLASSIFICATION), [Example("new-york")])
    assert found is not None
    by_tag = [{tag: round(float(p), 4) for tag, p in zip(TAGS, line, strict=True) if p > 1e-3} for line in found]
    assert by_tag == [{"B-city": 0.6, "I-item": 0.1, "O": 0.3}, *[{"I-city": 0.6, "I-item": 0.1, "O": 0.3}] * 2]


def test_tags_that_are_read_alike_share_their_probability() -> None:
    found = softmax(word_logits([{("O", ""): 0.6, ("B", "x"): 0.3, ("I", "x"): 0.1}], ("O", "B-x", "I-x", "[PAD]")))
    np.testing.assert_allclose(found, [[0.3, 0.3, 0.1, 0.3]], atol=1e-4)


def test_the_rows_in_the_docs_are_read_as_they_are_described(tokenizer: Tokenizer, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "labelling.md").read_text(encoding="utf-8")
    classes, entities = (
        [json.loads(line) for line in block.splitlines()] for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    )
    of_class = read(tmp_path, classes)
    of_class.check_labels(CLASSES, multi_label=False)
    assert [example.label for example in of_class.examples(multi_label=False)] == ["status", "refund"]
    of_words = read(tmp_path, entities, TOKEN_CLASSIFICATION)
    of_words.check_labels(["city"], multi_label=False)
    texts = [Example(row["text"]) for row in entities]
    for found in probabilities(tokenizer, of_words, texts):
        assert found is not None
        assert found[-1][TAGS.index("B-city")] == pytest.approx(0.8)
        assert found[-1][0] == pytest.approx(0.2)


PIECES = (
    "refund", "Lisbon", "e\u0301te\u0301", "na\u00efve", "Z\u0351alg\u0300o", "日本語", "東京タワー", "서울", "שלום", "مرحبا", "ไทย",
    "👍", "👩‍👩‍👧", "🇵🇹", "don't", "U.S.", "x-ray", "50%", "№5", "ﬁn", "İstanbul", "ß", "(", "):", "—", "«", "𝔘𝔫𝔦", "q" * 30,
)  # fmt: skip
BLANKS = (" ", "  ", "\t", "\u00a0", "\u3000", "\n")


def drawn(count: int, seed: int) -> list[Example]:
    """Texts of words of many scripts, some of which are entities."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        text, entities = "", []
        for _ in range(chance.randint(1, 6)):
            piece = chance.choice(BLANKS).join(chance.choice(PIECES) for _ in range(chance.randint(1, 3)))
            text += chance.choice(BLANKS) if text else ""
            if chance.random() < 0.5:
                entities.append(Entity(len(text), len(text) + len(piece), chance.choice(("city", "item"))))
            text += piece
        found.append(Example(text, entities=tuple(entities)))
    return found


def bytes_tokenizer(texts: list[str]) -> Tokenizer:
    """Pieces of bytes, as ModernBERT's and RoBERTa's tokenizers have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_pieces(texts: list[str]) -> Tokenizer:
    """Words in lower case without accents, as BERT's uncased tokenizer has; what it does not know is [UNK]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))  # noqa: S106 - no password
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def certain(encoded: Encoded) -> list[np.ndarray]:
    """Logits (words, tags) of the texts' own entities."""
    return [np.log(np.eye(len(TAGS))[targets] + 1e-9) for targets in encoded.targets]


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("makers", [(word_pieces, bytes_tokenizer), (bytes_tokenizer, word_pieces)])
def test_no_entity_is_misplaced_on_its_way_to_another_tokenizer(makers: tuple[Any, Any], count: int) -> None:
    texts = drawn(count, seed=count)
    theirs, ours = (TOKEN_CLASSIFICATION.encode(texts, maker([text.text for text in texts]), TAGS) for maker in makers)
    moved = differing = 0
    expected = ours.task.predictions(ours, certain(ours))
    carried: list[np.ndarray] = []
    for i, text in enumerate(texts):
        found, wanted = (words(text.text, e.offsets, e.word_ids) for e in (theirs.encodings[i], ours.encodings[i]))
        targets = zip(found, theirs.targets[i], strict=True)
        given = [WordAnswer(word.start, word.end, {TAGS[target]: 1.0}) for word, target in targets]
        places = [(word.start, word.end) for word in wanted]
        differing += places != [(word.start, word.end) for word in given]
        tags = align_labels(places, given)
        assert tags is not None
        names = [max(word, key=lambda tag: word[tag]) for word in tags]
        ids = [TAGS.index(prefix if prefix == "O" else f"{prefix}-{label}") for prefix, label in names]
        carried.append(np.log(np.eye(len(TAGS))[ids] + 1e-9))
        moved += len(text.entities or ())
    assert differing > count / 4  # the tokenizers do find other words
    assert moved > count
    assert ours.task.predictions(ours, carried) == expected


def words_row(*places: tuple[int, int], **tags: float) -> dict[str, Any]:
    return {"text": "ab", "words": [{"start": start, "end": end, "tags": tags or {"O": 1}} for start, end in places]}


def entity_row(end: int, **more: Any) -> dict[str, Any]:
    return {"text": "ab", "entities": [{"start": 0, "end": end, "label": "x"} | more]}


# A list of rows, of which the last one has the fault.
FAULTS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"text": "a", "label": "x"}, {"text": "a", "label": "y"}], "line 1, in another way"),
    ([{"text": "a", "labels": {"x": 1.5}}], "that of x is 1.5; a probability"),
    ([{"text": "a", "labels": {"x": True}}], "that of x is True; a probability"),
    ([{"text": "a", "labels": {}}], "`labels` is empty"),
    ([{"text": "a", "labels": 3}], "`labels` is int"),
    ([{"text": "a", "labels": {"x": 0.9, "y": 0.1}, "label": "y"}], "by `labels` 'x' is the likeliest"),
    ([{"label": "x"}], "has no `text`"),
    ([entity_row(3)], "past the end of the text"),
    ([entity_row(1, score=2)], "the score of x is 2"),
    ([words_row((0, 3))], "a word is at 0..3"),
    ([{"text": "ab", "words": [{"start": 0, "end": 1}]}], "an object of probabilities by tag"),
    ([words_row((0, 2), (1, 2))], "words overlap: 0..2 and 1..2"),
    ([words_row((0, 2), **{"O": 0.9, "B-x": 0.9})], "sum to 1.800"),
]


@pytest.mark.parametrize(("rows", "reason"), FAULTS, ids=[reason for _, reason in FAULTS])
def test_each_fault_of_a_row_is_named_with_its_line(tmp_path: Path, rows: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(BadRows) as refused:
        read(tmp_path, rows, TOKEN_CLASSIFICATION if {"words", "entities"} & {*rows[0]} else TEXT_CLASSIFICATION)
    ((line, said),) = [(fault.line, fault.reason) for fault in refused.value.faults]
    assert (line, reason in said) == (len(rows), True), said


def test_the_same_answer_twice_is_one(tmp_path: Path) -> None:
    assert len(read(tmp_path, [{"text": "a", "label": "x"}] * 2)) == 1


def test_files_without_answers_and_labels_of_another_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no answer"):
        read(tmp_path, [{"text": "a"}])
    (tmp_path / "answers.txt").write_text("a")
    with pytest.raises(BadInput, match=r"answers\.txt does not end in \.jsonl"):
        read_teacher_labels([tmp_path / "answers.txt"], TEXT_CLASSIFICATION)
    for row, labels, fault in (
        ({"text": "a", "labels": {"odd": 1}}, CLASSES, "labels that the task lacks: odd"),
        ({"text": "a", "labels": {"praise": 0.8, "refund": 0.8}}, CLASSES, r"sum to 1\.600"),
        (words_row((0, 2), **{"B-odd": 1}), ["city"], "labels that the task lacks: odd"),
    ):
        teacher = read(tmp_path, [row], TOKEN_CLASSIFICATION if "words" in row else TEXT_CLASSIFICATION)
        with pytest.raises(BadInput, match=fault):
            teacher.check_labels(labels, multi_label=False)


def test_unlikely_entities_are_soft_labels_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    unlikely = {"text": "to oslo", "entities": [{"start": 3, "end": 7, "label": "city", "score": 0.2}]}
    empty: dict[str, Any] = {"text": "to rome", "words": []}
    cut = {"text": "to rome now", "words": [{"start": 0, "end": 2, "tags": {"O": 1}}]}
    teacher = read(tmp_path, [unlikely, empty, cut], TOKEN_CLASSIFICATION)
    soft, *others = probabilities(tokenizer, teacher, [Example(row["text"]) for row in (unlikely, empty, cut)])
    assert soft is not None
    assert soft[1][TAGS.index("B-city")] == pytest.approx(0.2)
    assert [example.entities for example in teacher.examples(multi_label=False)] == [(), (), ()]
    assert others == [None, None]


def test_a_label_that_is_only_possible_may_be_unknown(tokenizer: Tokenizer, tmp_path: Path) -> None:
    teacher = read(tmp_path, [{"text": "a", "labels": {"refund": 0.6, "odd": 0.3, "praise": 0.1}}])
    teacher.check_labels(CLASSES, multi_label=False)
    (found,) = probabilities(tokenizer, teacher, [Example("a")])
    assert found is not None
    np.testing.assert_allclose(found, [[0.1, 0.6, 0.3]], atol=1e-6)  # what is left goes to the one that is not named


def test_answers_are_of_the_datas_kind(tmp_path: Path) -> None:
    parts = {"head": {"start": 0, "end": 1}, "tail": {"start": 2, "end": 3}}
    for row, several, relations, fault in (
        ({"label": "refund"}, True, False, "`label` is one string, and in the data it is a list"),
        ({"label": ["refund"]}, False, False, "`label` is a list, and in the data it is one string"),
        ({"label": "refund"}, False, True, "there is no `head` and `tail`"),
        ({"label": "refund", **parts}, False, False, "there are `head` and `tail`"),
    ):
        teacher = read(tmp_path, [{"text": "a b", **row}])
        with pytest.raises(BadInput, match=fault):
            teacher.check_kind(multi_label=several, relations=relations)
    soft = read(tmp_path, [{"text": "a b", "labels": {"refund": 0.9, "praise": 0.8}}])
    soft.check_kind(multi_label=True, relations=False)


def test_named_columns_and_null_fields_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "labels": {"x": 0.9, "y": None}, "label": None},  # as `label` writes, and parquet gives back
        {"sentence": "b", "class": "y", "labels": None},
        {"sentence": "c", "class": {"x": 1.0}},
        {"text": "d", "labels": ["x", "y"]},
        {"text": "e", "labels": None},
    ]
    file = write_rows(tmp_path / "answers.jsonl", rows)
    teacher = read_teacher_labels([file], TEXT_CLASSIFICATION, Columns(text="sentence", label="class"))
    assert [(each.text, each.label) for each in teacher.examples(multi_label=False)] == [
        ("a", "x"), ("b", "y"), ("c", "x"), ("d", ("x", "y")),
    ]  # fmt: skip
    spans = [
        {"text": "a b", "words": None, "spans": [{"start": 0, "end": 1, "label": "x"}]},
        {"text": "c", "entities": None},
    ]
    file = write_rows(tmp_path / "spans.jsonl", spans)
    assert len(read_teacher_labels([file], TOKEN_CLASSIFICATION, Columns(entities="spans"))) == 1


def test_texts_are_held_whatever_their_blanks_capitals_and_points(tmp_path: Path) -> None:
    held = CachedLabels([Example(" a "), Example("b", "c")])
    assert Example("a\n") in held
    assert Example("A.") in held
    assert Example("b ", " C!") in held
    assert Example("b") not in held
    rows = [{"text": "a  ", "label": "x"}, {"text": "d", "label": "odd"}, {"text": "e", "label": "x"}]
    teacher = read(tmp_path, rows)
    assert [each.text for each in teacher.without([Example("a")], "odd").examples(multi_label=False)] == ["e"]


def test_relations_and_pairs_are_matched_as_they_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    parts = {"head": {"start": 0, "end": 1}, "tail": {"start": 2, "end": 3}}
    rows = [
        {"text": "a b", "label": "refund", **parts},
        {"text": "a b", "label": "status", "head": parts["tail"], "tail": parts["head"]},
        {"text": "a", "text_pair": "b", "label": "praise"},
    ]
    teacher = read(tmp_path, rows)
    marked = [Example("a b", head=(0, 1), tail=(2, 3)), Example("a b", head=(2, 3), tail=(0, 1))]
    found = probabilities(tokenizer, teacher, [*marked, Example("a", "b"), Example("a b")])
    likeliest = [None if each is None else CLASSES[int(each.argmax())] for each in found]
    assert likeliest == ["refund", "status", "praise", None]


def test_names_without_probabilities_are_as_sure_as_the_labels_agree(tokenizer: Tokenizer, tmp_path: Path) -> None:
    names = ("a", "b", "c")
    labelled = [Example(f"text {i}", label="a" if i % 10 else "b") for i in range(40)]  # 36 of 40 answers are right
    rows = [{"text": example.text, "label": "a"} for example in labelled]
    rows += [{"text": "beside", "label": "c"}, {"text": "sure", "labels": {"b": 0.6, "c": 0.4}}]
    teacher = read(tmp_path, rows)
    smooth, line = teacher.smoothed(labelled, names)
    assert "88.1% sure, as 40 texts" in line
    texts = [*labelled[:1], Example("beside"), Example("sure")]
    encoded = TEXT_CLASSIFICATION.encode(texts, tokenizer, names)
    found = [softmax(rows)[0].tolist() for rows in smooth.logits(encoded, texts) if rows is not None]
    sure = 37 / 42
    assert found[0] == pytest.approx([sure, (1 - sure) / 2, (1 - sure) / 2], abs=1e-5)
    assert found[1] == pytest.approx([(1 - sure) / 2, (1 - sure) / 2, sure], abs=1e-5)
    assert found[2] == pytest.approx([0, 0.6, 0.4], abs=1e-5)
    assert teacher.smoothed(labelled[:20], names) == (teacher, "")  # too few to say


def test_labels_that_may_all_apply_are_smoothed_by_what_was_named_and_missed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    names, several = ("a", "b"), TEXT_CLASSIFICATION.with_multi_label(True)
    labelled = [Example(f"text {i}", label=("a", "b") if i < 8 else ("a",)) for i in range(40)]
    teacher = read(tmp_path, [{"text": example.text, "label": ["a"]} for example in labelled], several)
    smooth, _ = teacher.smoothed(labelled, names)
    (rows,) = smooth.logits(several.encode(labelled[:1], tokenizer, names), labelled[:1])
    assert rows is not None
    assert (1 / (1 + np.exp(-rows[0]))).tolist() == pytest.approx([41 / 42, 9 / 42], abs=1e-5)
