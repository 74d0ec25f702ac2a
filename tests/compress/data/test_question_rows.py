"""Questions with contexts and answers: every form of their rows, their faults, and the targets of their windows."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from small_task import make_tokenizer
from tokenizers import Tokenizer

from compress.data.examples import Example, examples_fingerprint
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.splits import read_splits
from compress.tasks import QUESTION_ANSWERING
from serve.text.labels import SPAN_ENDS
from serve.text.questions import QuestionRow
from serve.text.tokenizer import load_tokenizer

CONTEXT = "the kettle is sent to Oslo"
OSLO = {"text": "Oslo", "answer_start": 22}
EXPECTED = [
    Example("where", CONTEXT, answers=((22, 26),)),
    Example("why", CONTEXT, answers=()),
]


def squad(questions: list[dict[str, Any]]) -> dict[str, Any]:
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": questions}]}]}


def test_every_form_of_a_file_gives_the_same_questions(tmp_path: Path) -> None:
    nested = squad([
        {"id": "1", "question": "where", "answers": [OSLO, OSLO], "is_impossible": False},
        {"id": "2", "question": "why", "answers": [], "plausible_answers": [OSLO], "is_impossible": True},
    ])  # fmt: skip
    forms: dict[str, list[dict[str, Any]]] = {
        "places": [{"start": 22, "end": 26}],
        "wide": [{"start": 21, "end": 26}],  # white space around it is no part of it
        "own-text": [{"start": 21, "end": 26, "text": "Oslo"}, {"start": 22, "end": 26, "text": ""}],
        "squad": [OSLO, OSLO],
        "hub": {"text": ["Oslo"], "answer_start": [22]},  # type: ignore[dict-item]
    }
    (tmp_path / "nested.json").write_text(json.dumps(nested, indent=1), encoding="utf-8")
    files = [tmp_path / "nested.json"]
    for name, answers in forms.items():
        none: Any = {"text": [], "answer_start": []} if name == "hub" else []
        rows = [
            {"question": "where", "context": CONTEXT, "answers": answers},
            {"question": "why", "context": CONTEXT, "answers": none},
        ]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "lines.json").write_text(files[-1].read_text(encoding="utf-8"), encoding="utf-8")
    for file in [*files, tmp_path / "lines.json"]:
        assert read_examples(file, QUESTION_ANSWERING) == EXPECTED, file.name
    assert EXPECTED[0].answer_texts == ("Oslo",)
    assert examples_fingerprint(EXPECTED) != examples_fingerprint(
        [EXPECTED[0], Example("why", CONTEXT, answers=((0, 3),))]
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "where", "context": CONTEXT}, "has no `answers`"),
        ({"question": "where", "passage": CONTEXT, "answers": []}, "has no `context`"),
        ({"question": " ", "context": CONTEXT, "answers": []}, "`question` is empty"),
        ({"question": "where", "context": CONTEXT, "answers": "Oslo"}, "`answers` is str; a list is needed"),
        ({"question": "where", "context": CONTEXT, "answers": ["Oslo"]}, "`answers` holds 'Oslo'; an object with"),
        (
            {"question": "where", "context": CONTEXT, "answers": [{"text": "Rome", "answer_start": 22}]},
            "`answers` holds 'Rome' at 22, and the context has 'Oslo' there",
        ),
        (
            {"question": "where", "context": CONTEXT, "answers": [{"text": "Oslo", "answer_start": 24}]},
            "which is no place in the context (26 code points)",
        ),
        (
            {"question": "where", "context": CONTEXT, "answers": [{"start": 3, "end": 4}]},
            "`answers` at 3..4 covers only whitespace",
        ),
        (
            {"question": "where", "context": CONTEXT, "answers": [{"start": True, "end": 4}]},
            "which is no place in the context",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_reason(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(
        json.dumps({"question": "a", "context": "b", "answers": []}) + "\n" + json.dumps(row), encoding="utf-8"
    )
    with pytest.raises(BadRows) as raised:
        read_examples(file, QUESTION_ANSWERING)
    assert "bad.jsonl, line 2: " in str(raised.value)
    assert reason in str(raised.value)


def test_files_that_cannot_hold_questions_say_why(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("question,context,answers\na,b,c\n", encoding="utf-8")
    (tmp_path / "broken.json").write_text(json.dumps({"data": [{"paragraphs": [{"qas": [{}]}]}]}), encoding="utf-8")
    (tmp_path / "unanswered.json").write_text(json.dumps(squad([{"id": "1", "question": "where"}])), encoding="utf-8")
    for name, reason in (
        ("table.csv", "whose cells cannot hold answers"),
        ("broken.json", "is not SQuAD's JSON"),
        ("unanswered.json", "has no `answers`"),
    ):
        with pytest.raises(BadRows, match=reason):
            read_examples(tmp_path / name, QUESTION_ANSWERING)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(folder, 24)


def test_each_window_has_its_own_target_and_one_without_the_answer_has_none(tokenizer: Tokenizer) -> None:
    context = " ".join(["the lamp is late"] * 6) + " from Oslo " + " ".join(["the radio is lovely"] * 4)
    start = context.index("Oslo")
    examples = [
        Example("where is it", context, answers=((start, start + 4),)),
        Example("where is it", "the lamp is late", answers=()),
        Example("where is it", "the lamp is late", answers=None),
    ]
    encoded = QUESTION_ANSWERING.encode(examples, tokenizer, SPAN_ENDS)
    assert tokenizer.truncation
    assert encoded.owners is not None
    assert encoded.owners.tolist() == sorted(encoded.owners.tolist())
    assert encoded.owners.tolist()[-2:] == [1, 2]
    holding = 0
    for place in range(len(encoded) - 2):
        targets, row = encoded.targets[place], cast(QuestionRow, encoded.encodings[place])
        assert len(encoded.ids[place]) <= 24
        assert targets.sum(axis=0).tolist() == [1, 1, 1]
        first, last = (int(targets[:, column].argmax()) for column in (1, 2))
        held = [stretch for stretch in row.words.tolist() if context[stretch[0] : stretch[1]] == "Oslo"]
        if held:
            holding += 1
            assert [[first - 1, last - 1]] == [stretch[2:] for stretch in held]
        else:
            assert first == last == 0
    assert 1 <= holding < len(encoded) - 2
    assert encoded.targets[-2].sum(axis=0).tolist() == [1, 1, 1]
    assert encoded.targets[-1].sum(axis=0).tolist() == [1, 0, 0]
    part = encoded.take([len(encoded) - 1, 0])
    assert part.owners is not None
    assert part.owners.tolist() == [2, 0]
    both = encoded + encoded
    assert both.owners is not None
    assert np.unique(both.owners).tolist() == [0, 1, 2, 3, 4, 5]


def test_questions_about_one_context_are_held_out_together(tmp_path: Path) -> None:
    contexts = [f"order {i} is sent to Oslo" for i in range(30)]
    rows = [
        {"question": question, "context": context, "answers": []}
        for context in contexts
        for question in ("where", "why", "when")
    ]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    splits = read_splits(str(tmp_path), QUESTION_ANSWERING)
    assert splits.held_out
    held = {example.text_pair for example in splits.validation}
    assert (len(held), len(splits.validation), len(splits.train)) == (3, 9, 81)
    assert not held & {example.text_pair for example in splits.train}
    assert held != {example.text_pair for example in read_splits(str(tmp_path), QUESTION_ANSWERING, seed=1).validation}
