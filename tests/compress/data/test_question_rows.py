"""Questions with contexts and answers: every form of their rows, their faults, and the targets of their windows."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from data_files import lines_of, written
from tokenizers import Tokenizer

from compress.data.examples import Example, examples_fingerprint
from compress.data.labelled_files import read_examples
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


def test_every_form_of_a_file_gives_the_same_questions(tmp_path: Path) -> None:
    questions = [
        {"id": "1", "question": "where", "answers": [OSLO, OSLO], "is_impossible": False},
        {"id": "2", "question": "why", "answers": [], "plausible_answers": [OSLO], "is_impossible": True},
    ]
    paragraphs = [{"context": CONTEXT, "qas": questions}]
    nested = {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}
    forms: dict[str, list[dict[str, Any]]] = {
        "places": [{"start": 22, "end": 26}],
        "wide": [{"start": 21, "end": 26}],  # white space around it is no part of it
        "own-text": [{"start": 21, "end": 26, "text": "Oslo"}, {"start": 22, "end": 26, "text": ""}],
        "squad": [OSLO, OSLO],
        "hub": {"text": ["Oslo"], "answer_start": [22]},  # type: ignore[dict-item]
    }
    (tmp_path / "nested.json").write_text(json.dumps(nested, indent=1), encoding="utf-8")
    files = [written(tmp_path / "nested.json", json.dumps(nested, indent=1))]
    for name, answers in forms.items():
        none: Any = {"text": [], "answer_start": []} if name == "hub" else []
        given = (("where", answers), ("why", none))
        rows = [{"question": question, "context": CONTEXT, "answers": answers} for question, answers in given]
        files += [
            written(tmp_path / f"{name}.jsonl", lines_of(*rows)),
            written(tmp_path / f"{name}.json", lines_of(*rows)),
        ]
    for file in files:
        assert read_examples(file, QUESTION_ANSWERING) == EXPECTED, file.name
    assert EXPECTED[0].answer_texts == ("Oslo",)
    others = [EXPECTED[0], Example("why", CONTEXT, answers=((0, 3),))]
    assert examples_fingerprint(EXPECTED) != examples_fingerprint(others)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder, 24)


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
        written(tmp_path / f"{name}.jsonl", lines_of(*rows))
    splits = read_splits(str(tmp_path), QUESTION_ANSWERING)
    assert splits.held_out
    held = {example.text_pair for example in splits.validation}
    assert (len(held), len(splits.validation), len(splits.train)) == (3, 9, 81)
    assert not held & {example.text_pair for example in splits.train}
    assert held != {example.text_pair for example in read_splits(str(tmp_path), QUESTION_ANSWERING, seed=1).validation}
