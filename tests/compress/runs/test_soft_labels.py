"""Soft labels: which teacher labels which text, its confidence, and which share of them a student learns."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from compress.data.examples import Example, Splits
from compress.distributed import ProcessShare
from compress.evaluation.predictions import row_logits
from compress.runs import method_trainings, soft_labels, task_stages
from compress.runs.open_task import open_task
from compress.runs.task_inputs import TaskInputs, unseen
from compress.settings import TaskSettings
from compress.tasks import TOKEN_CLASSIFICATION
from serve.errors import BadInput
from serve.text.answers import softmax
from serve.text.spans import words


def opened(tiny_teacher: Path, task_data: Path, tmp_path: Path, **more: Any) -> TaskInputs:
    task = {"task": "text-classification", "student": "layers=2,hidden=32,heads=4,ffn=32", "method": "soft-labels"}
    given = task | more
    return open_task(TaskSettings(teacher=str(tiny_teacher), data=str(task_data), threads=1, **given), tmp_path)


def test_folds_are_equal_parts_with_their_share_of_every_class() -> None:
    examples = [Example(f"text {i}", label="rare" if i % 10 == 0 else "often") for i in range(100)]
    folds = soft_labels.fold_of(examples, 2, seed=3)
    assert Counter(folds.tolist()) == {0: 50, 1: 50}
    assert Counter(folds[::10].tolist()) == {0: 5, 1: 5}
    assert (folds == soft_labels.fold_of(examples, 2, seed=3)).all()
    assert (folds != soft_labels.fold_of(examples, 2, seed=4)).any()
    assert not soft_labels.fold_of(examples, 1, seed=3).any()


def test_copies_of_a_text_are_in_one_fold() -> None:
    examples = [Example(text, label=f"class {i % 5}") for i in range(100) for text in (f"Text {i}", f"text {i}!")]
    folds = soft_labels.fold_of(examples, 4, seed=0)
    assert (folds[::2] == folds[1::2]).all()
    assert Counter(folds.tolist()) == dict.fromkeys(range(4), 50)
    assert set(Counter((each.label, fold) for each, fold in zip(examples, folds, strict=True)).values()) == {10}


def test_a_text_gets_the_soft_labels_of_the_teacher_that_has_not_seen_it(
    tiny_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    inputs = opened(tiny_teacher, task_data, tmp_path, folds=2, augment=1)
    folders = {name: tmp_path / name for name in ("teacher", "0", "1", "soft")}
    for folder in folders.values():
        folder.mkdir()
    task_stages.make_fold_teacher(folders["teacher"], inputs, 2, fold=9)  # of no text: reads all
    for fold in range(2):
        task_stages.make_fold_teacher(folders[str(fold)], inputs, 3 + fold, fold)
    soft_labels.make_soft_labels(folders["soft"], inputs, folders["teacher"], [folders["0"], folders["1"]])
    found = soft_labels.read_soft_labels(folders["soft"], inputs)
    folds = soft_labels.fold_of(inputs.splits.train, 2, 0)
    models = {name: task_stages.load_stage(folders[name], inputs) for name in ("teacher", "0", "1")}
    of = {name: row_logits(model, inputs.soft_labelled) for name, model in models.items()}
    for i, rows in enumerate(found):
        source = str(folds[i]) if i < len(inputs.train) else "teacher"
        np.testing.assert_allclose(rows, of[source][i], atol=1e-5)
    sure = soft_labels.read_confidence(folders["soft"])
    assert sure["train"] == soft_labels.confidence(of["teacher"][: len(inputs.train)], multi_label=False)
    assert sure["train_out_of_fold"] == soft_labels.confidence(found[: len(inputs.train)], multi_label=False)


def test_a_fold_teacher_skips_its_fold(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = opened(tiny_teacher, task_data, tmp_path, folds=3)
    read: list[str] = []

    def seen(_stage: Any, _teacher: Any, _student: Any, text: Any, *_: Any, **__: Any) -> Any:
        read.extend(text.texts.texts)
        return task_stages.Progress()

    monkeypatch.setattr(task_stages, "train_stage", seen)
    task_stages.make_fold_teacher(tmp_path, inputs, 2, fold=1)
    folds = soft_labels.fold_of(inputs.splits.train, 3, 0)
    assert sorted(read) == sorted(e.text for e, fold in zip(inputs.splits.train, folds, strict=True) if fold != 1)


def test_class_weights_reach_every_loss_on_labels(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[Any] = []
    for module in (task_stages, method_trainings):
        monkeypatch.setattr(
            module, "train_stage", lambda stage, *_, **__: stages.append(stage) or task_stages.Progress()
        )
    inputs = opened(tiny_teacher, task_data, tmp_path, method="xtremedistil", class_weights=True)
    model, soft = task_stages.model_with_head(inputs), [np.zeros((1, 3), np.float32)] * len(inputs.train)
    folders = {each: tmp_path / each for each in ("teacher", "start", "out")}
    for folder in folders.values():
        folder.mkdir()
    task_stages.on_task(model, tmp_path, inputs, 2, 1e-4, "labels")
    task_stages.on_task(model, tmp_path, inputs, 2, 1e-4, "both", soft=soft, soft_weight=0.5)
    task_stages.save(model, folders["teacher"], inputs, task_stages.Progress(), {"role": "teacher"})
    task_stages.make_start(folders["start"], inputs, folders["teacher"])
    (link,) = inputs.chain.links(0, 1000)
    given = method_trainings.method_inputs(inputs, folders["teacher"], 0)
    method_trainings.train(folders["out"], given, link, 5, folders["start"], folders["teacher"])
    count = Counter(example.label for example in inputs.splits.train)
    expected = [len(inputs.train) / (len(count) * count[label]) for label in inputs.labels]
    assert len(stages) == 3
    for stage in stages:
        (weights,) = (term.class_weights for term in stage.objective.outputs if term.loss == "labels")
        assert weights == pytest.approx(expected)


def test_class_weights_of_entities_are_refused(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--class-weights weighs the classes of texts that have one each"):
        opened(tiny_teacher, task_data, tmp_path, task="token-classification", class_weights=True)


@pytest.mark.parametrize("name", ["logits-head", "logits"])
def test_a_stage_that_learns_outputs_alone_asks_about_each_text_once(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    unlabelled = tmp_path / "unlabelled.txt"
    unlabelled.write_text("a card that no train file has\na hotel that no train file has\n")
    inputs = opened(tiny_teacher, task_data, tmp_path, method="xtremedistil", unlabelled=(str(unlabelled),))
    folders = {each: tmp_path / each for each in ("teacher", "start", "out")}
    for folder in folders.values():
        folder.mkdir()
    model, none = task_stages.model_with_head(inputs), task_stages.Progress()
    task_stages.save(model, folders["teacher"], inputs, none, {"role": "teacher"})
    task_stages.make_start(folders["start"], inputs, folders["teacher"])
    given = method_trainings.method_inputs(inputs, folders["teacher"], 0)
    (link,) = inputs.chain.links(0, 4 * sum(map(len, inputs.train.ids)) / 0.1)
    number = [stage.name for stage in link.stages].index(name) + 1
    read: list[int] = []
    asked = method_trainings.shared_row_logits
    monkeypatch.setattr(
        method_trainings, "shared_row_logits", lambda model, texts: read.append(len(texts)) or asked(model, texts)
    )
    trained = method_trainings.train_stage

    def watched(stage: Any, teacher: Any, *rest: Any, **more: Any) -> Any:
        assert teacher is None
        progress = trained(stage, teacher, *rest, **more)
        assert progress.step >= 4 * 2  # epochs of two batches or more
        return progress

    monkeypatch.setattr(method_trainings, "train_stage", watched)
    method_trainings.train(folders["out"], given, link, number, folders["start"], folders["teacher"])
    assert read == [len(inputs.train) + 2]


def test_confidence_is_the_mean_probability_of_the_likeliest_answer() -> None:
    rows = [np.log(np.array([[0.7, 0.2, 0.1]])), np.log(np.array([[0.1, 0.5, 0.4], [0.3, 0.3, 0.4]]))]
    assert soft_labels.confidence(rows, multi_label=False) == pytest.approx((0.7 + 0.5 + 0.4) / 3, abs=1e-4)
    applies = [np.log(np.array([[0.9 / 0.1, 0.2 / 0.8]]))]
    assert soft_labels.confidence(applies, multi_label=True) == pytest.approx((0.9 + 0.8) / 2, abs=1e-4)


def test_texts_of_validation_and_test_are_kept_out_whatever_their_points_and_capitals() -> None:
    splits = Splits([Example("Mine")], [Example("Book a flight")], [Example("Is 1.5 more?")])
    texts = ["book a flight!", "BOOK  A FLIGHT", "is 1.5 more", "is 15 more", "mine", "book flights"]
    assert [each.text for each in unseen([*map(Example, texts)], splits)] == ["is 15 more", "mine", "book flights"]


def trial(folder: Path, reached: float) -> Path:
    folder.mkdir()
    (folder / soft_labels.TRIAL).write_text(json.dumps({"validation": reached}))
    return folder


@pytest.mark.parametrize(("half", "most", "taken"), [(0.8, 0.7, 0.5), (0.7, 0.8, 0.9), (0.8, 0.8, 0.9)])
def test_the_better_soft_share_is_taken(tmp_path: Path, half: float, most: float, taken: float) -> None:
    trials = {0.5: trial(tmp_path / "half", half), 0.9: trial(tmp_path / "most", most)}
    (tmp_path / soft_labels.CONFIDENCE).write_text('{"train": 0.99, "validation": 0.91}')
    soft = soft_labels.chosen_share(tmp_path, trials)
    assert soft.weight == taken
    share, sure = soft_labels.soft_label_lines(soft.lineage)
    assert f"share of {taken:g}" in share
    assert "0.990 on train and 0.910 on validation" in sure


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"folds": 1}, "Give 2"),
        ({"folds": 2, "method": "labels"}, "--folds has no effect on --method labels"),
        ({"batch": 1, "augment": 1}, "--batch 1 has no room for a labelled text beside one of the"),
        ({"folds": 2, "method": "minilmv2", "then": "labels"}, "--folds has no effect on --method minilmv2"),
    ],
)
def test_useless_folds_are_refused(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, settings: dict[str, Any], fault: str
) -> None:
    with pytest.raises(BadInput, match=fault):
        opened(tiny_teacher, task_data, tmp_path, **settings)


def test_a_teacher_that_was_fine_tuned_before_has_no_folds(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    inputs = opened(tiny_teacher, task_data, tmp_path, folds=2)
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    task_stages.make_fold_teacher(tuned, inputs, 1, 0)
    with pytest.raises(BadInput, match="was fine-tuned on the task before"):
        opened(tuned, task_data, tmp_path, folds=2)


def test_the_shares_of_processes_are_the_whole_to_the_bit(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    inputs = opened(tiny_teacher, task_data, tmp_path, folds=2)
    folder = tmp_path / "teacher"
    folder.mkdir()
    task_stages.make_fold_teacher(folder, inputs, 1, 0)
    model = task_stages.load_stage(folder, inputs)
    whole = row_logits(model, inputs.train)
    parts = [row_logits(model, inputs.train, share=ProcessShare(number, 2)) for number in range(2)]
    computed = [[rows.size > 0 for rows in part] for part in parts]
    assert all(one != other for one, other in zip(*computed, strict=True))
    assert all(any(part) for part in computed)
    for rows, one, other in zip(whole, *parts, strict=True):
        assert (rows == (one if one.size else other)).all()


def test_soft_labels_go_to_the_words_that_share_their_characters_where_tokens_differ() -> None:
    """A byte-level tokenizer has one word in `...`, and three once the piece is trimmed away."""
    text = "see http://rome... thanks"
    pieces = ("rome", "http", "see", "thanks")
    whole, trimmed = byte_level(("...", "://", *pieces)), byte_level(pieces)
    labels = ("O", "B-city", "I-city")
    theirs, ours = (TOKEN_CLASSIFICATION.encode([Example(text)], each, labels) for each in (whole, trimmed))
    assert len(theirs.rows[0]) < len(ours.rows[0])
    places = [
        [(word.start, word.end) for word in words(text, each.encodings[0].offsets, each.encodings[0].word_ids)]
        for each in (theirs, ours)
    ]
    logits = np.full((len(places[0]), 3), -3.0, dtype=np.float32)
    for row, (start, end) in enumerate(places[0]):
        logits[row, 1 if text[start:end] == "rome" else 0] = 3.0
    found = soft_labels._carried(theirs, ours, 0, logits)
    assert found.shape == (len(ours.rows[0]), 3)
    likeliest = {text[start:end]: labels[int(row.argmax())] for (start, end), row in zip(places[1], found, strict=True)}
    assert likeliest.pop("rome") == "B-city"
    assert set(likeliest.values()) == {"O"}
    city = [text[start:end] for start, end in places[1]].index("rome")
    np.testing.assert_allclose(softmax(found[city]), softmax(np.array([-3.0, 3.0, -3.0])), atol=1e-6)


def byte_level(pieces: tuple[str, ...]) -> Tokenizer:
    """A byte-level BPE that makes `pieces` and otherwise splits into bytes."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for piece in pieces:
        for prefix in ("", "Ġ"):
            letters = prefix + piece
            for end in range(1, len(letters)):
                pair = (letters[:end], letters[end])
                if "".join(pair) not in vocabulary:
                    merges.append(pair)
                    vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer
