"""What a language model is told, and what of its answer is taken."""

from pathlib import Path
from typing import Any

import pytest

from compress.data.examples import Example
from compress.labelling.prompts import answer_of, system_prompt, user_prompt
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from serve.errors import BadInput

LABELS = ("city", "item")


def entities(said: str, text: str) -> list[tuple[int, int, str]]:
    found = answer_of(said, Example(text), TOKEN_CLASSIFICATION, LABELS)["entities"]
    return [(each["start"], each["end"], each["label"]) for each in found]


@pytest.mark.parametrize(
    ("named", "text", "expected"),
    [
        (["lamp:item", "Rome:city"], "a lamp from Rome", [(2, 6, "item"), (12, 16, "city")]),
        # The same words again are those behind.
        (["Rome:city", "Rome:city"], "Rome to Rome", [(0, 4, "city"), (8, 12, "city")]),
        # In any order, and none within another.
        (["York:city", "New York:city"], "York, New York", [(0, 4, "city"), (6, 14, "city")]),
        (["New York:city", "York:city"], "York, New York", [(0, 4, "city"), (6, 14, "city")]),
        # Whole words before parts of others, which are taken where there is nothing else.
        (["Rome:city"], "Romeo flew to Rome", [(14, 18, "city")]),
        (["art:item"], "start with art", [(11, 14, "item")]),
        (["東京:city"], "東京都", [(0, 2, "city")]),
        (["Rom:city"], "fly to Rome", [(7, 10, "city")]),
        ([], "nothing", []),
        ([" Rome :city"], "👍 Rome", [(2, 6, "city")]),
    ],
)
def test_entities_are_found_in_the_text(named: list[str], text: str, expected: list[tuple[int, int, str]]) -> None:
    parts = [each.rpartition(":") for each in named]
    items = ", ".join(f'{{"text": "{words}", "label": "{label}", "start": 99}}' for words, _, label in parts)
    assert entities(f'{{"entities": [{items}]}}', text) == expected


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("Sure! The city is Rome.", "the answer is not JSON: 'Sure!"),
        ("[]", "the answer is not a JSON object"),
        ('{"entities": 3}', "`entities` is not a list"),
        ('{"entities": [{"text": "Paris", "label": "city"}]}', "'Paris' does not stand in the text; copy entities from it exactly"),
        ('{"entities": [{"text": "Rome", "label": "town"}]}', "'town' is not one of the labels: city, item"),
        ('{"entities": [{"text": "Rome", "label": "city"}, {"text": "Rome", "label": "city"}]}', "'Rome' does not stand in the text"),
        ('{"entities": ["Rome"]}', "'Rome' is not an object with `text` and `label`"),
    ],
)  # fmt: skip
def test_unusable_answers_name_their_fault(said: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault.replace("[", r"\[")) as refused:
        entities(said, "fly to Rome")
    assert str(refused.value).startswith(fault)


@pytest.mark.parametrize(
    ("said", "multi_label", "expected"),
    [
        ('{"label": "item"}', False, {"label": "item"}),
        ('```json\n{"label": "item"}\n```', False, {"label": "item"}),
        ('{"label": ["item", "city", "item"]}', True, {"label": ["city", "item"]}),
        ('{"label": []}', True, {"label": []}),
        ('{"label": "item"}', True, None),
        ('{"label": ["item"]}', False, None),
        ('{"label": "Item"}', False, None),
        ('{"labels": "item"}', False, None),
    ],
)
def test_labels_are_those_of_the_task(said: str, multi_label: bool, expected: dict[str, Any] | None) -> None:
    if expected is not None:
        assert answer_of(said, Example("a"), TEXT_CLASSIFICATION.with_multi_label(multi_label), LABELS) == expected
        return
    with pytest.raises(ValueError):  # noqa: PT011 - any fault
        answer_of(said, Example("a"), TEXT_CLASSIFICATION.with_multi_label(multi_label), LABELS)


THOUGHT = 'The label {"label": "city"} would be wrong.'


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (f'<think>\n{THOUGHT}\n</think>\n\n{{"label": "item"}}', ""),
        (f'{THOUGHT}</think>{{"label": "item"}}', ""),  # some templates begin the block themselves
        (f'<THINK>{THOUGHT}</THINK>```json\n{{"label": "item"}}\n```', ""),
        (f'<thinking>a <think> {THOUGHT}</thinking>{{"label": "item"}}', ""),
        (f'<think>a<think>{THOUGHT}</think>{THOUGHT}</think>{{"label": "item"}}', ""),
        (f'[THINK]{THOUGHT}[/THINK]{{"label": "item"}}', ""),
        (f'<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{{"label": "item"}}', ""),
        (f'{{"label": "item"}}\n<think>{THOUGHT}</think>', ""),
        ('Here is the answer:\n```json\n{"label": "item"}\n```\nLet me know if you need more!', ""),
        ('Of the form {"label": "..."}: {"label": "item"}. {Sure}', ""),
        ('{"label": "item"} and again {"label": "item"}', ""),
        ('[{"label": "item"}]', ""),
        ('{"label": "item"} or {"label": "city"}', "the answer has 2 JSON objects that differ"),
        (f"<think>{THOUGHT}", "the answer is not JSON"),
        ('{"label": "town", "others": [{"label": "item"}', "the answer is not JSON"),
        ('{"label": "town", "why": "of {\\"label\\": 1} and', "the answer is not JSON"),
        ('Sure: {"label": "town"}', "'town' is not one of the labels"),
    ],
)  # fmt: skip
def test_thoughts_and_sentences_around_the_answer_are_read_past(said: str, fault: str) -> None:
    if fault:
        with pytest.raises(ValueError, match=fault):
            answer_of(said, Example("a"), TEXT_CLASSIFICATION, LABELS)
    else:
        assert answer_of(said, Example("a"), TEXT_CLASSIFICATION, LABELS) == {"label": "item"}


def test_a_tag_of_thoughts_may_stand_in_the_text_itself() -> None:
    found = entities('{"entities": [{"text": "</think>", "label": "item"}]}', "the tag </think> is one")
    assert found == [(8, 16, "item")]


def test_instructions_name_the_labels_and_texts_are_given_as_they_are_read(tmp_path: Path) -> None:
    for task in (TEXT_CLASSIFICATION, TEXT_CLASSIFICATION.with_multi_label(True), TOKEN_CLASSIFICATION):
        assert "- city\n- item\n" in system_prompt(None, task, LABELS)
    own = tmp_path / "own.txt"
    own.write_text("Pick one: {labels}")
    assert system_prompt(own, TEXT_CLASSIFICATION, LABELS) == "Pick one: - city\n- item"
    own.write_text("Pick one.")
    with pytest.raises(BadInput, match=r"has no \{labels\}"):
        system_prompt(own, TEXT_CLASSIFICATION, LABELS)
    assert user_prompt(Example("a", "b")) == "First text:\na\n\nSecond text:\nb"
    assert user_prompt(Example("a to b", head=(0, 1), tail=(5, 6))) == "[E1] a [/E1] to [E2] b [/E2]"
