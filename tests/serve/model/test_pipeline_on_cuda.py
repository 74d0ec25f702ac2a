"""On a GPU: a small BERT's bundle answers as on the CPU, in fp32 and fp16, alone and in batches."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from lookup_bundles import write_manifest
from server_process import serving
from small_checkpoints import MAX_LENGTH, TAGS, WORDS, farthest, write_checkpoint

from serve.bundle.runtimes import CUDA, gpu_lacks
from serve.errors import BundleError
from serve.model import session as sessions
from serve.model.pipeline import Pipeline
from serve.model.session import Session
from serve.tasks import Answer
from serve.text.inputs import TextWork
from serve.text.tokenizer import load_tokenizer
from stillroom.verbs.annotate.pool import OfflinePool

# Of logits. TF32 has as few bits as fp16, so that fp32 in TF32 would be farther away than its tolerance.
TOLERANCES = {"fp32": 2e-4, "fp16": 2e-2}


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs a GPU that onnxruntime can use."""
    lacks = gpu_lacks()
    return pytest.mark.gpu(pytest.mark.skipif(bool(lacks), reason=lacks)(test))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """60 texts of 1 to 20 words, so that batches have padding; one is longer than the model."""
    return [" ".join((WORDS * 2)[start % 20 :][: 1 + start % 20]) for start in range(60)] + [" ".join(WORDS * 4)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A random 2x32 BERT in fp32, fp16 and an int8 that must not be opened; int8 is the default."""
    from export.graph.exporter import export_graph
    from export.precision.fp16 import write_fp16

    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "bert")
    folder = tmp_path_factory.mktemp("bundles") / "small"
    (folder / "onnx").mkdir(parents=True)
    fp32 = folder / "onnx" / "model.onnx"
    export_graph(checkpoint, fp32, MAX_LENGTH)
    encodings = load_tokenizer(checkpoint, MAX_LENGTH).encode_batch(texts[:20])
    write_fp16(onnx.load(fp32), folder / "onnx" / "model_fp16.onnx", encodings, threads=1)
    (folder / "onnx" / "model_quantized.onnx").write_bytes(b"")
    (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    files = {"fp32": "model", "fp16": "model_fp16", "int8": "model_quantized"}
    variants = {
        name: {"file": f"onnx/{file}.onnx", "scheme": name, "runtime": "onnxruntime"} for name, file in files.items()
    }
    write_manifest(folder, labels=TAGS, max_length=MAX_LENGTH, variants=variants, default_variant="int8")
    return folder


def test_a_provider_that_does_not_start_is_an_error_and_not_the_cpu(entities_bundle: Path) -> None:
    if CUDA in sessions.ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with (
        pytest.warns(UserWarning, match=CUDA),
        pytest.raises(BundleError, match=r"CUDAExecutionProvider did not start.*pip install 'onnxruntime-gpu"),
    ):
        Session(entities_bundle / "onnx" / "model.onnx", threads=1, device="cuda")


@on_gpu
@pytest.mark.parametrize(("variant", "file"), [("fp32", "model"), ("fp16", "model_fp16")])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_logits_are_the_cpus_in_every_batch(
    bundle: Path, texts: list[str], variant: str, file: str, batch: int
) -> None:
    encodings = load_tokenizer(bundle, MAX_LENGTH).encode_batch(texts)
    expected = Session(bundle / "onnx" / "model.onnx", threads=1).run(encodings)
    session = Session(bundle / "onnx" / f"{file}.onnx", threads=1, device="cuda")
    starts = range(0, len(encodings), batch)
    actual = [row for start in starts for row in session.run(encodings[start : start + batch])]
    assert farthest(expected, actual) < TOLERANCES[variant]


@on_gpu
def test_a_pipeline_gives_the_answers_of_the_cpu(bundle: Path, texts: list[str]) -> None:
    expected, actual = (Pipeline(bundle, "fp32", 1, device=device)(texts) for device in ("cpu", "cuda"))
    assert [shape(answer) for answer in actual] == [shape(answer) for answer in expected]
    for one, other in zip(actual, expected, strict=True):
        assert scores(one) == pytest.approx(scores(other), abs=1e-3)


@on_gpu
def test_worker_processes_answer_on_the_gpu_and_one_is_enough(bundle: Path, texts: list[str]) -> None:
    pipeline = Pipeline(bundle, device="cuda", log_notes=False)
    assert (pipeline.variant, pipeline.session.device) == ("fp16", "cuda")
    with OfflinePool(bundle, device="cuda") as pool:
        assert (pool.processes, pool.variant) == (1, "fp16")
        answers = pool.submit([TextWork(text) for text in texts]).result()
    assert all(isinstance(answer, bytes) for answer in answers)


@on_gpu
def test_a_server_says_its_device_and_answers(bundle: Path) -> None:
    with serving(bundle, "--device", "cuda") as server:
        (described,) = server.get("/v1/models").json()["models"]
        assert (described["device"], described["variant"]) == ("cuda", "fp16")
        answer = server.post("/v1/entities", json={"text": ["fly to rome", "a"]})
        assert (answer.status_code, answer.json()["variant"]) == (200, "fp16")
        assert any("fp16 answers instead" in line for line in server.log())


def shape(answer: Answer) -> list[tuple[object, ...]]:
    """The labels and places of an answer's entities."""
    return [(each["label"], each["start"], each["end"]) for each in answer["entities"]]  # type: ignore[typeddict-item]


def scores(answer: Answer) -> list[float]:
    return [each["score"] for each in answer["entities"]]  # type: ignore[typeddict-item]
