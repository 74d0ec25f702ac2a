"""The page about integrations, each passage in its client's own environment; those that are not installed are left out.

STILLROOM_CLIENTS is a folder with a virtual environment, or a folder with `node_modules`, for each section of the page, of its name.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lookup_bundles import INTENTS, city_table, intent_table, number_table, write_bundle, write_vectors_bundle
from server_process import serving
from small_task import make_teacher, write_splits

import stillroom as face
from benchmarks.serve.integrations import (
    QUESTION,
    agreeing,
    answered,
    answers_of,
    is_script,
    letters,
    own_answers,
    passages,
)
from compress.models.sentence_pooling import SentencePooling, write_pooling

CLIENTS = os.environ.get("STILLROOM_CLIENTS")
TEXTS = ["i love it", "please refund", "fly from rome to oslo", "new york"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("bundles")
    bundles = [
        write_bundle(folder / "my-tagger", city_table()),
        write_bundle(folder / "my-classifier", intent_table(), task="text-classification", labels=INTENTS),
        write_vectors_bundle(folder / "my-vectors"),
        write_bundle(folder / "my-ranker", number_table(), task="text-regression", labels=["score"]),
    ]
    with serving(*bundles) as running:
        yield running.url


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of small encoders with random weights, for libraries that read files: of vectors, and of answers to questions."""
    import torch
    from transformers import BertForQuestionAnswering

    folder = tmp_path_factory.mktemp("exported")
    vectors = make_teacher(folder / "vectors", num_hidden_layers=1, initializer_range=0.3)
    write_pooling(vectors, SentencePooling("mean", normalised=True), 32, 32)
    face.export(vectors, folder / "my-vectors", latency_seconds=0, threads=1)
    reader = make_teacher(folder / "reader", num_hidden_layers=1, initializer_range=0.3)
    torch.manual_seed(0)
    BertForQuestionAnswering.from_pretrained(reader).save_pretrained(reader)
    first = [{"text": text.split()[0], "answer_start": 0} for text in TEXTS]
    rows = [
        {"question": QUESTION, "context": text, "answers": [word]} for text, word in zip(TEXTS, first, strict=True)
    ] * 10
    data = write_splits(folder / "data", lambda count, _: rows[:count], (40, 10, 10))
    face.export(reader, folder / "my-reader", data, variants=("fp32",), gate=0.0, latency_seconds=0, threads=1)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not CLIENTS, reason="STILLROOM_CLIENTS is not set")
@pytest.mark.parametrize(("section", "code"), list(passages()))
def test_each_client_on_the_page_gets_the_answers_of_v1(section: str, code: str, url: str, bundles: Path) -> None:
    environment = Path(str(CLIENTS)) / section
    if not environment.exists():
        pytest.skip(f"{section} is not installed")
    told = answers_of(environment, code, url, TEXTS, bundles)
    if "my-reader" in code:  # random weights answer nothing, so that only what a library makes of the outputs is held
        assert all(letters(answer) in letters(text) for answer, text in zip(told, TEXTS, strict=True))
        return
    assert agreeing(told, own_answers(code, url, TEXTS, bundles)) == len(TEXTS)


def test_answers_that_differ_do_not_agree() -> None:
    vectors = np.eye(3).tolist()
    assert agreeing([[2.0, 0.0, 0.0], *vectors[1:]], vectors) == 3  # length is not compared
    assert agreeing(vectors[::-1], vectors) == 1
    assert agreeing([[["city", 0, 4]], []], [[["city", 0, 5]], []]) == 1
    assert agreeing(["a"], ["a", "a"]) == 0
    assert answered(["new york", "oslo", "b"], ["New  York", "", "c"]) == (["newyork", "b"], ["newyork", "c"])


def test_every_section_of_the_page_has_a_passage_that_names_what_it_asks() -> None:
    found = list(passages())
    assert len(found) == 23
    assert len({section for section, _ in found}) == 16
    for _, code in found:
        if not is_script(code):
            compile(code, "integrations.md", "exec")
        assert "answers = " in code
