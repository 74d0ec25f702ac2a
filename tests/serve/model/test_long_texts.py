"""Texts longer than the model, through the pipeline. A lookup model's logits do not depend on context, so that windows must say what a
model of any length says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_bundles import CITIES, INTENTS, VOCABULARY, WORDS, city_table, intent_table, write_bundle, write_manifest
from tokenizers import Tokenizer

from serve.bundle.runtimes import Device
from serve.errors import BadInput, InternalError
from serve.model.pipeline import Pipeline
from serve.text.answers import AnswerOptions
from serve.text.entity_markers import MARKERS, marked
from serve.text.inputs import TextWork
from serve.text.spans import Aggregation

LONG = "fly to rome from new york or oslo " * 12  # 110 tokens, of 32 that the models read
texts = st.lists(st.sampled_from([*CITIES, *WORDS, "romes", "newer", "😀", ","]), max_size=150).map(" ".join)


@pytest.fixture(scope="module")
def cities(entities_bundle: Path) -> Pipeline:
    return Pipeline(entities_bundle, threads=1)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The model of `cities`, which reads any length."""
    folder = tmp_path_factory.mktemp("bundles") / "endless"
    return Pipeline(write_bundle(folder, city_table(), max_length=1_000_000), threads=1)


@pytest.fixture(scope="module")
def intents(intents_bundle: Path) -> Pipeline:
    return Pipeline(intents_bundle, threads=1)


@pytest.fixture(scope="module")
def relations(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Says `refund` more surely the more `refund` it reads; knows the four markers."""
    folder = tmp_path_factory.mktemp("bundles") / "relations"
    table = np.concatenate([intent_table(), np.zeros((4, len(INTENTS)))])
    write_bundle(folder, table, task="text-classification", labels=INTENTS, relations=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.add_special_tokens(list(MARKERS)) == 4
    assert tokenizer.token_to_id(MARKERS[0]) == len(VOCABULARY)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_manifest(folder, task="text-classification", labels=INTENTS, relations=True)
    return Pipeline(folder, threads=1)


def answers_of(pipeline: Pipeline, given_texts: Sequence[str], run_tokens: int) -> list[Any]:
    """What `answered` yields of each text, in order; each exactly once."""
    works = [TextWork(text) for text in given_texts]
    found = [each for done, _ in pipeline.answered(works, run_tokens) for each in done]
    assert sorted(place for place, _ in found) == list(range(len(works)))
    return [answer for _, answer in sorted(found, key=lambda each: each[0])]


@settings(max_examples=60, deadline=None)
@given(text=texts, aggregation=st.sampled_from(["first", "average", "max", "strict"]), constrained=st.booleans())
def test_windows_find_what_a_model_of_any_length_finds(
    cities: Pipeline, endless: Pipeline, text: str, aggregation: Aggregation, constrained: bool
) -> None:
    asked: dict[str, Any] = {"aggregation": aggregation, "constrained": constrained}
    assert cities(text, **asked) == endless(text, **asked)


def test_an_entity_far_beyond_the_models_length_is_found_where_it_stands(cities: Pipeline) -> None:
    text = "a 😀 " * 400 + "rome"
    assert cities(text, offsets="utf16") == {
        "entities": [{"label": "city", "text": "rome", "start": 2000, "end": 2004, "score": 0.93624}],
        "truncated": False,
    }


def test_a_text_that_fits_is_read_by_itself_and_one_more_token_makes_two_windows(cities: Pipeline) -> None:
    def rows(words: int) -> list[int]:
        return [parts.texts for _, parts in cities.answered([TextWork("a " * words)], 1)]

    assert rows(30) == [1]  # with its two special tokens it has 32
    assert rows(31) == [1, 1]


def test_a_cut_text_is_answered_by_its_beginning(cities: Pipeline) -> None:
    assert cities("a " * 40 + "rome", truncate=True) == {"entities": [], "truncated": True}
    assert cities("rome", truncate=True) == cities("rome")
    text = "rome " * 40
    cut = cities(text, truncate=True)
    assert len(cut["entities"]) == 30
    assert cut == {**cities(text[: 30 * 5]), "truncated": True}


@pytest.mark.parametrize("run_tokens", [1, 64, 100, 4096])
def test_a_long_texts_answer_does_not_depend_on_company(cities: Pipeline, intents: Pipeline, run_tokens: int) -> None:
    given_texts = [LONG, "rome", "oslo " * 50, "", "love refund " * 30, LONG + "paris", "fly " * 29]
    for pipeline in (cities, intents):
        alone = [pipeline(text) for text in given_texts]
        assert answers_of(pipeline, given_texts, run_tokens) == alone
        assert answers_of(pipeline, given_texts[::-1], run_tokens) == alone[::-1]


@pytest.mark.parametrize("run_tokens", [1, 64, 4096])
def test_a_window_that_fails_fails_its_own_text_once(broken_bundle: Path, cities: Pipeline, run_tokens: int) -> None:
    answers = answers_of(
        Pipeline(broken_bundle, threads=1), [LONG, f"refund {LONG}", "rome", f"{LONG} refund {LONG} refund"], run_tokens
    )
    assert [isinstance(answer, InternalError) for answer in answers] == [False, True, False, True]
    assert [answers[0], answers[2]] == cities([LONG, "rome"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_failure_of_the_gpu_is_no_answer(broken_bundle: Path, device: Device) -> None:
    """A worker ends by it and is replaced, since CUDA may not recover before the process ends."""

    def failing(*_asked: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    pipeline = Pipeline(broken_bundle, threads=1)
    pipeline.session.device, pipeline.session._run = device, failing
    if device == "cuda":
        with pytest.raises(InternalError, match="on the GPU"):
            answers_of(pipeline, ["refund"], 64)
    else:
        (answer,) = answers_of(pipeline, ["refund"], 64)
        assert isinstance(answer, InternalError)


def test_the_classes_of_a_long_text_are_those_of_its_windows_pooled(intents: Pipeline) -> None:
    # 90 own tokens in 4 windows of 30: only the last one reads `refund`.
    answer = intents("a " * 80 + "refund " * 10)
    assert answer["labels"][0]["label"] == "refund"
    assert answer["truncated"] is False
    (start, room, decided) = (
        60,
        30,
        25,
    )  # of the last, tokens 60-89; 65-89 are nearer to its middle than to the third's
    assert start + room == 90
    logit = 9.0 * 10 / 32 * decided / 90
    expected = np.exp(logit) / (np.exp(logit) + 2)
    assert answer["labels"][0]["score"] == pytest.approx(expected, abs=1e-6)


def test_a_long_pair_is_cut_and_says_so(intents: Pipeline) -> None:
    short, long = "refund", "a " * 5_000
    assert intents(short, text_pair=long)["truncated"] is True
    # [CLS] refund [SEP] 28 of the longer one [SEP]
    assert intents(short, text_pair=long) == {**intents(short, text_pair="a " * 28), "truncated": True}
    # Both are long: half for each, which a tokenizer that makes all it cuts off would need gigabytes for.
    assert intents(long, text_pair="refund " * 20_000)["truncated"] is True
    assert intents("it", text_pair="refund")["truncated"] is False


def test_a_long_text_of_a_relation_is_read_round_its_markers(relations: Pipeline) -> None:
    text = "a " * 500 + "rome is refund a oslo" + " a" * 500
    head, tail = text.index("rome"), text.index("oslo")
    asked = marked(text, (head, head + 4), (tail, tail + 4))
    answer = relations(asked)
    assert answer["labels"][0]["label"] == "refund"
    assert answer["labels"][0]["score"] == round(float(np.exp(9 / 32) / (np.exp(9 / 32) + 2)), 6)
    assert answer["truncated"] is True
    assert relations(asked, truncate=True)["labels"][0]["score"] == round(1 / 3, 6)


def test_a_relation_of_parts_too_far_apart_is_refused_and_spoils_no_other_answer(relations: Pipeline) -> None:
    text = "rome " + "a " * 40 + "oslo"
    asked = marked(text, (0, 4), (len(text) - 4, len(text)))
    with pytest.raises(BadInput, match="span 46 tokens, markers included, and the model reads 30") as caught:
        relations(asked)
    assert caught.value.field == "text"
    short = marked("refund it", (0, 6), (7, 9))
    refused, answered = answers_of(relations, [asked, short], 64)
    assert isinstance(refused, BadInput)
    assert answered == relations(short)


def test_options_of_one_text_do_not_reach_another(cities: Pipeline) -> None:
    works = [
        TextWork("york", options=AnswerOptions(aggregation="strict")),
        TextWork("york"),
        TextWork("york", options=AnswerOptions(constrained=True)),
        TextWork("a " * 40 + "rome", options=AnswerOptions(truncate=True)),
    ]
    found = dict(each for done, _ in cities.answered(works) for each in done)
    # `york` is surest of `I-city`; where that may not begin an entity it is none, or a less sure `B-city`.
    assert [[each["score"] > 0.9 for each in found[place]["entities"]] for place in range(4)] == [
        [],
        [True],
        [False],
        [],
    ]
    assert [found[place]["truncated"] for place in range(4)] == [False, False, False, True]
