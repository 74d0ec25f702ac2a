"""`--device cuda`: which file of a bundle answers, and what is refused before anything starts."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime
import pytest
from patience import PATIENCE_S
from repository import ROOT

from serve.bundle import runtimes
from serve.bundle.manifest import Bundle
from serve.bundle.runtimes import INSTALL_ONNXRUNTIME_GPU, choose, choose_for_gpu, gpu_lacks, gpus
from serve.errors import BadInput, BundleError
from serve.http.app import fronts_of
from serve.model.pipeline import Pipeline
from serve.settings import ServeSettings
from serve.tasks import open_bundle
from serve.workers.offline_pool import OfflinePool

Copy = Callable[[Path], Path]
Writer = Callable[..., None]

NO_CUDA = pytest.mark.skipif(not gpu_lacks(), reason="onnxruntime runs on a GPU here")


@pytest.fixture
def bundle_with(entities_bundle: Path, copied: Copy, manifest_writer: Writer) -> Callable[..., Bundle]:
    """`bundle_with(variants, default, int8_runtime)`: a bundle of these variants."""

    def make(variants: Sequence[str], default: str, int8_runtime: str = "onnxruntime") -> Bundle:
        folder = copied(entities_bundle)
        described = {
            name: {
                "file": "onnx/model.onnx",
                "scheme": "static" if name == "int8" else name,
                "runtime": int8_runtime if name == "int8" else "onnxruntime",
            }
            for name in variants
        }
        manifest_writer(folder, variants=described, default_variant=default)
        return open_bundle(folder)

    return make


@pytest.mark.parametrize(
    ("variants", "default", "asked", "answers"),
    [
        (["fp32", "fp16", "int8"], "int8", None, "fp16"),
        (["fp32", "int8"], "int8", None, "fp32"),
        (["fp32", "fp16", "int8"], "fp32", None, "fp32"),
        (["fp32", "fp16", "int8"], "int8", "fp32", "fp32"),
    ],
)
def test_a_default_int8_gives_way_on_a_gpu_and_nothing_else_does(
    bundle_with: Callable[..., Bundle], variants: list[str], default: str, asked: str | None, answers: str
) -> None:
    variant, runtime, notes = choose_for_gpu(bundle_with(variants, default), asked)
    assert (variant, runtime) == (answers, "onnxruntime")
    replaced = asked is None and default == "int8"
    assert [f"no fast kernels on a GPU: {answers} answers instead" in note for note in notes] == [True] * replaced


@pytest.mark.parametrize(
    ("variants", "remedy"),
    [
        (["fp32", "fp16", "int8"], "give --variant fp16 or fp32, or --device cpu"),
        (["fp32", "int8"], "give --variant fp32, or --device cpu"),
        (["int8"], "give --device cpu"),
    ],
)
def test_int8_that_was_asked_for_is_refused_with_what_to_give(
    bundle_with: Callable[..., Bundle], variants: list[str], remedy: str
) -> None:
    with pytest.raises(BundleError, match=f"is int8, for which .* on a GPU: {remedy}$"):
        choose_for_gpu(bundle_with(variants, "int8"), "int8")


def test_a_bundle_of_int8_alone_is_refused(bundle_with: Callable[..., Bundle]) -> None:
    with pytest.raises(BundleError, match=r"give --device cpu$"):
        choose_for_gpu(bundle_with(["int8"], "int8"))


def test_a_file_for_openvino_gives_way_or_is_refused(bundle_with: Callable[..., Bundle]) -> None:
    bundle = bundle_with(["fp32", "int8"], "int8", int8_runtime="openvino")
    variant, runtime, (note,) = choose_for_gpu(bundle)
    assert (variant, runtime) == ("fp32", "onnxruntime")
    assert "is for the runtime 'openvino', and --device cuda runs onnxruntime: fp32 answers instead" in note
    with pytest.raises(BundleError, match=r"'openvino', and --device cuda .*: give --variant fp32, or --device cpu"):
        choose_for_gpu(bundle, "int8")


def test_a_gpu_is_asked_about_the_variant_and_an_edited_card_is_noted(
    bundle_with: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_with(["fp32", "int8"], "int8")
    monkeypatch.setattr(runtimes, "gpu_lacks", str)  # as if there were a GPU
    assert choose(bundle, device="cuda").variant == "fp32"
    edited = Bundle(bundle.path, bundle.manifest, card_edited=True)
    assert "was edited" in choose(edited, device="cuda").notes[0]


@NO_CUDA
def test_a_gpu_that_is_not_here_is_refused_before_anything_starts(entities_bundle: Path) -> None:
    command = [sys.executable, "-m", "serve", str(entities_bundle), "--device", "cuda", "--port", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: --device is cuda, but onnxruntime's CUDAExecutionProvider ")
    assert ended.stderr.count("\n") == 1
    for opened in (Pipeline, OfflinePool):
        with pytest.raises(BadInput, match="--device is cuda, but onnxruntime's CUDAExecutionProvider"):
            opened(entities_bundle, device="cuda")


@pytest.mark.skipif(gpus() > 0, reason="there is a GPU")
@pytest.mark.parametrize(
    ("providers", "remedy"),
    [([], INSTALL_ONNXRUNTIME_GPU), ([runtimes.CUDA], "finds no GPU: nvidia-smi must list one")],
)
def test_the_package_is_named_where_it_is_missing_and_the_driver_where_that_is(
    monkeypatch: pytest.MonkeyPatch, providers: list[str], remedy: str
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*providers, "CPUExecutionProvider"])
    assert gpu_lacks().endswith(remedy)


def test_a_gpu_has_one_worker_process_and_one_front_unless_more_are_given() -> None:
    assert fronts_of(ServeSettings(device="cuda")) == (1, 1)
    assert fronts_of(ServeSettings(device="cuda", processes=3)) == (1, 3)


@pytest.mark.parametrize("device", ["gpu", "cuda:0", ""])
def test_a_device_of_another_name_is_refused_and_not_run_on_the_cpu(entities_bundle: Path, device: str) -> None:
    for opened in (Pipeline, OfflinePool):
        with pytest.raises(BadInput, match="give 'cpu' or 'cuda'"):
            opened(entities_bundle, device=device)  # type: ignore[arg-type]
