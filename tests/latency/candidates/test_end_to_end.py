"""From text to answer in timed parts: what is answered is what the pipeline answers, and nothing is lost on the way."""

from pathlib import Path
from typing import Any

import pytest
from lookup_bundles import INTENTS, TAGS, city_table, intent_table, write_bundle

from latency.candidates.candidate import Candidate, Reads, load
from latency.candidates.end_to_end import EndToEnd, Parts, Text
from serve.bundle.runtimes import has_openvino
from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.text.tokenizer import load_tokenizer

# Of all lengths and not in the order of their lengths: none, one word, more than the model's 32 tokens.
TEXTS = [
    "fly to rome from new york",
    "",
    "refund",
    "please " * 40 + "oslo",
    "i love it and new york",
    "fly fly refund to münchen",
    "new york rome oslo",
]
PAIRS = [(text, pair) for text, pair in zip(TEXTS, reversed(TEXTS), strict=True) if text and pair]
KINDS: dict[str, dict[str, Any]] = {
    "entities": {"table": city_table()},
    "classes": {"table": intent_table(), "task": "text-classification", "labels": INTENTS},
}
# Shifted, so that a label applies where its word is a good part of the text.
KINDS["multi-label"] = KINDS["classes"] | {"table": intent_table() - 1.5, "multi_label": True}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("end-to-end")
    return {kind: write_bundle(folder / kind, **given) for kind, given in KINDS.items()}


def candidate_of(bundle: Path, runtime: Any = "onnxruntime") -> Candidate:
    """The bundle's graph as `stillroom profile` times it."""
    manifest = Pipeline(bundle).manifest
    reads = Reads(bundle, manifest.task, tuple(manifest.labels), manifest.multi_label)
    return Candidate("student", runtime, "fp32", bundle / "onnx" / "model.onnx", 1, "cpu", 32, reads)


def end_to_end(bundle: Path, runtime: Any = "onnxruntime") -> EndToEnd:
    candidate = candidate_of(bundle, runtime)
    return EndToEnd(candidate, load(candidate))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_tokens", [1, 40, 4096], ids=["one-by-one", "a-few", "all-at-once"])
def test_answers_are_those_of_the_pipeline_in_the_order_of_the_texts(
    bundles: dict[str, Path], kind: str, batch_tokens: int
) -> None:
    answers = end_to_end(bundles[kind]).many(TEXTS, batch_tokens).answers
    assert answers == Pipeline(bundles[kind], threads=1)(TEXTS, truncate=True)
    assert len({str(answer) for answer in answers}) > 3  # or their order could not be told


@pytest.mark.parametrize("kind", ["classes", "multi-label"])
def test_a_text_with_its_pair_is_answered_as_one(bundles: dict[str, Path], kind: str) -> None:
    pipeline, ours = Pipeline(bundles[kind], threads=1), end_to_end(bundles[kind])
    texts, pairs = (list(each) for each in zip(*PAIRS, strict=True))
    found = ours.many(PAIRS, 64)
    assert found.answers == pipeline(texts, text_pair=pairs)
    assert found.answers != pipeline(texts)
    assert found.parts.tokens == sum(map(len, pipeline.encode(texts, pairs)))
    assert [ours.one(pair).tokens for pair in PAIRS] == [len(each) for each in pipeline.encode(texts, pairs)]


@pytest.mark.skipif(not has_openvino(), reason="OpenVINO is not installed: pip install openvino")
@pytest.mark.parametrize("kind", KINDS)
def test_the_padding_that_openvino_adds_is_in_no_answer(kind: str, tmp_path: Path) -> None:
    variants = {"fp32": {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "openvino"}}
    bundle = write_bundle(tmp_path / kind, **KINDS[kind], variants=variants)
    ours = end_to_end(bundle, "openvino")
    assert ours.many(TEXTS, 4096).answers == Pipeline(bundle, threads=1)(TEXTS, truncate=True)
    assert [ours.one(text).tokens for text in TEXTS] == [8, 2, 3, 32, 8, 7, 6]


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_the_parts_of_texts_are_parts_of_the_whole_in_batches_of_no_more_tokens_than_asked_for(
    bundles: dict[str, Path], batch_tokens: int
) -> None:
    candidate = candidate_of(bundles["classes"])
    call, shapes = load(candidate), []

    def seen(inputs: Any) -> Any:
        shapes.append(inputs["input_ids"].shape)
        return call(inputs)

    found = EndToEnd(candidate, seen).many(TEXTS, batch_tokens)
    lengths = [len(each) for each in load_tokenizer(bundles["classes"], 32).encode_batch(TEXTS)]
    alone = [EndToEnd(candidate, call).one(text) for text in TEXTS]
    assert [parts.tokens for parts in alone] == lengths
    assert all(ms > 0 for parts in (found.parts, *alone) for ms in parts[1:])
    assert found.parts.tokens == sum(lengths)
    assert sum(found.parts[1:]) <= 1e3 * found.wall_s
    assert sum(rows * tokens for rows, tokens in shapes) == found.padded_tokens
    assert all(rows * tokens <= batch_tokens or rows == 1 for rows, tokens in shapes)
    assert sum(rows for rows, _ in shapes) == len(TEXTS)
    assert (max(rows for rows, _ in shapes) > 1) is (batch_tokens > 1)


def test_no_text_at_all_is_no_answer(bundles: dict[str, Path]) -> None:
    texts: list[Text] = []
    found = end_to_end(bundles["classes"]).many(texts, 64)
    assert (found.answers, found.parts, found.padded_tokens) == ([], Parts(0, found.parts.tokenise_ms, 0, 0), 0)


@pytest.mark.parametrize("lacking", ["reads", "max_length"])
def test_a_candidate_that_does_not_say_how_it_reads_text_is_refused(bundles: dict[str, Path], lacking: str) -> None:
    reads = Reads(bundles["entities"], "token-classification", tuple(TAGS))
    given: dict[str, Any] = {"reads": reads, "max_length": 32, lacking: None}
    candidate = Candidate("bare", "onnxruntime", "fp32", bundles["entities"] / "onnx/model.onnx", 1, **given)
    with pytest.raises(BadInput, match="candidate 'bare' has no tokenizer"):
        EndToEnd(candidate, load(candidate))
