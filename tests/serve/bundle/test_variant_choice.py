"""Which file of a bundle answers on this processor or GPU, and in which runtime; what is refused before anything starts."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime
import pytest
from lookup_bundles import write_manifest
from starlette.testclient import TestClient

from serve.bundle import runtimes
from serve.bundle.cpu import HIDDEN_VARIABLE, cpu_features, suits
from serve.bundle.manifest import Bundle
from serve.bundle.runtimes import INSTALL_ONNXRUNTIME_GPU, choose, choose_for_gpu, gpu_lacks, gpus
from serve.errors import BadInput, BundleError
from serve.http.app import create_app, processes_of
from serve.model.pipeline import Pipeline
from serve.settings import ServeSettings
from serve.tasks import open_bundle
from stillroom.verbs.annotate.pool import OfflinePool

# What Linux says of an Intel processor of 2015, and of one of 2023.
OLD = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu sse2 avx avx2 fma\n"
NEW = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma avx512f avx512_vnni amx_int8\n"
VNNI = ["avx512_vnni", "avx_vnni", "amx_int8", "arm64"]
FILE = "onnx/model.onnx"


@pytest.fixture
def eight_bits(bundle_copy: Path) -> Path:
    """A bundle whose default variant needs VNNI."""
    fp32 = {"file": FILE, "scheme": "fp32", "runtime": "onnxruntime", "cpu": []}
    int8 = {"file": FILE, "scheme": "static", "runtime": "onnxruntime", "cpu": VNNI}
    write_manifest(bundle_copy, variants={"fp32": fp32, "int8": int8}, default_variant="int8")
    return bundle_copy


def test_features_are_read_where_linux_tells_them(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(NEW)
    assert {"avx512_vnni", "amx_int8"} <= cpu_features(file, "x86_64", {})
    file.write_text(OLD)
    assert not cpu_features(file, "x86_64", {}) & set(VNNI)
    file.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    assert {"arm64", "asimddp"} <= cpu_features(file, "aarch64", {})
    assert cpu_features(tmp_path / "nowhere", "arm64", {}) == {"arm64"}
    assert cpu_features(tmp_path / "nowhere", "AMD64", {}) == frozenset()


@pytest.mark.parametrize(
    ("hidden", "left"),
    [
        ("", {"avx2", "avx512_vnni", "amx_int8"}),
        ("avx512_vnni", {"avx2", "amx_int8"}),
        ("avx512_vnni, amx_int8,", {"avx2"}),
        ("avx_vnni,arm64", {"avx2", "avx512_vnni", "amx_int8"}),  # what the processor lacks anyway
    ],
)
def test_hidden_features_are_absent_and_nothing_else_changes(tmp_path: Path, hidden: str, left: set[str]) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("flags : avx2 avx512_vnni amx_int8\n")
    assert cpu_features(file, "x86_64", {HIDDEN_VARIABLE: hidden}) == left


@pytest.mark.parametrize("hidden", ["avx512-vnni", "avx512_vnni,AMX_INT8", "avx2", "avx512_vnni amx_int8"])
def test_a_feature_to_hide_that_nothing_here_depends_on_is_refused_by_name(tmp_path: Path, hidden: str) -> None:
    unknown = hidden.rpartition(",")[2]
    with pytest.raises(BadInput) as refused:
        cpu_features(tmp_path / "nowhere", "x86_64", {HIDDEN_VARIABLE: hidden})
    assert f"STILLROOM_HIDE_CPU_FEATURES names {unknown}, which is unknown" in refused.value.message
    assert "amx_bf16, amx_int8, arm64, avx512_bf16, avx512_vnni, avx_vnni" in refused.value.message


def test_an_arm_can_be_hidden_too(tmp_path: Path) -> None:
    assert cpu_features(tmp_path / "nowhere", "aarch64", {HIDDEN_VARIABLE: "arm64"}) == frozenset()


def test_a_server_whose_features_are_hidden_answers_as_an_older_processor_would(
    eight_bits: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HIDDEN_VARIABLE, ",".join(VNNI))
    with TestClient(create_app([eight_bits], ServeSettings(processes=1))) as client:
        answer = client.post("/v1/entities", json={"text": "fly to rome"})
    assert (answer.status_code, answer.json()["variant"]) == (200, "fp32")
    assert "needs a processor with one of avx512_vnni" in caplog.text


def test_a_file_suits_a_processor_with_any_one_of_what_it_needs() -> None:
    assert suits([], [])
    assert suits(VNNI, ["avx2", "avx_vnni"])
    assert not suits(VNNI, ["avx2"])


def test_a_new_processor_serves_what_was_measured(eight_bits: Path) -> None:
    assert choose(open_bundle(eight_bits), features=["avx512_vnni"]) == ("int8", "onnxruntime", ())


def test_an_old_processor_serves_fp32_and_says_why(eight_bits: Path) -> None:
    variant, runtime, (note,) = choose(open_bundle(eight_bits), features=["avx2"])
    assert (variant, runtime) == ("fp32", "onnxruntime")
    assert "needs a processor with one of avx512_vnni" in note
    assert "fp32 answers instead" in note


def test_an_old_processor_refuses_8_bits_that_were_asked_for_or_are_all_there_is(eight_bits: Path) -> None:
    with pytest.raises(BundleError, match=r"saturate.*name another variant"):
        choose(open_bundle(eight_bits), "int8", features=["avx2"])
    int8 = {"file": FILE, "scheme": "static", "runtime": "onnxruntime", "cpu": VNNI}
    write_manifest(eight_bits, variants={"int8": int8}, default_variant="int8")
    with pytest.raises(BundleError, match="saturate"):
        choose(open_bundle(eight_bits), features=["avx2"])


def pinned_to(runtime: str, scheme: str, folder: Path) -> Bundle:
    variant = {"file": FILE, "scheme": scheme, "runtime": runtime, "cpu": []}
    write_manifest(folder, variants={"fp32": variant}, default_variant="fp32")
    return open_bundle(folder)


def test_onnxruntime_stands_in_for_openvino_and_a_note_says_so(bundle_copy: Path) -> None:
    bundle = pinned_to("openvino", "fp32", bundle_copy)
    assert choose(bundle, openvino=True) == ("fp32", "openvino", ())
    variant, runtime, (note,) = choose(bundle, openvino=False)
    assert (variant, runtime) == ("fp32", "onnxruntime")
    assert "pip install '.[openvino]'" in note


def test_openvino_gives_the_same_entities(entities_bundle: Path, bundle_copy: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    pinned_to("openvino", "fp32", bundle_copy)
    pipeline = Pipeline(bundle_copy, threads=1)
    assert pipeline.session.runtime == "openvino"
    assert pipeline("fly from rome to new york") == Pipeline(entities_bundle, threads=1)("fly from rome to new york")


def test_a_runtime_that_nobody_knows_is_refused(bundle_copy: Path) -> None:
    bundle = pinned_to("tvm", "fp32", bundle_copy)
    with pytest.raises(BundleError, match="is for the runtime 'tvm'; this program has onnxruntime and openvino"):
        choose(bundle)


def test_dynamic_int8_is_warned_of(bundle_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    pinned_to("onnxruntime", "dynamic", bundle_copy)
    with caplog.at_level(logging.WARNING, logger="serve"):
        Pipeline(bundle_copy, threads=1)
    assert "depends on the other texts in its batch" in caplog.text


NO_CUDA = pytest.mark.skipif(not gpu_lacks(), reason="onnxruntime runs on a GPU here")


@pytest.fixture
def bundle_with(bundle_copy: Path) -> Callable[..., Bundle]:
    """`bundle_with(variants, default, int8_runtime)`: a bundle of these variants."""

    def make(variants: Sequence[str], default: str, int8_runtime: str = "onnxruntime") -> Bundle:
        described = {
            name: {
                "file": "onnx/model.onnx",
                "scheme": "static" if name == "int8" else name,
                "runtime": int8_runtime if name == "int8" else "onnxruntime",
            }
            for name in variants
        }
        write_manifest(bundle_copy, variants=described, default_variant=default)
        return open_bundle(bundle_copy)

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
    ("variants", "asked", "remedy"),
    [
        (["fp32", "fp16", "int8"], "int8", "--variant fp16 or fp32, or --device cpu"),
        (["fp32", "int8"], "int8", "--variant fp32, or --device cpu"),
        (["int8"], "int8", "--device cpu"),
        (["int8"], None, "--device cpu"),
    ],
)
def test_int8_is_refused_with_what_to_give_where_it_was_asked_for_or_is_all_there_is(
    bundle_with: Callable[..., Bundle], variants: list[str], asked: str | None, remedy: str
) -> None:
    with pytest.raises(BundleError, match=f"give {remedy}$"):
        choose_for_gpu(bundle_with(variants, "int8"), asked)


def test_a_file_for_openvino_gives_way_or_is_refused(bundle_with: Callable[..., Bundle]) -> None:
    bundle = bundle_with(["fp32", "int8"], "int8", int8_runtime="openvino")
    variant, runtime, (note,) = choose_for_gpu(bundle)
    assert (variant, runtime) == ("fp32", "onnxruntime")
    assert "is for the runtime 'openvino', and --device cuda runs onnxruntime: fp32 answers instead" in note
    with pytest.raises(BundleError, match=r"'openvino', and --device cuda .*: give --variant fp32, or --device cpu"):
        choose_for_gpu(bundle, "int8")


def test_on_a_gpu_an_edited_card_is_noted_too(
    bundle_with: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_with(["fp32", "int8"], "int8")
    monkeypatch.setattr(runtimes, "gpu_lacks", str)  # as if there were a GPU
    assert choose(bundle, device="cuda").variant == "fp32"
    edited = Bundle(bundle.path, bundle.manifest, card_edited=True)
    assert "was edited" in choose(edited, device="cuda").notes[0]


@NO_CUDA
def test_a_gpu_that_is_not_here_is_refused_at_once(entities_bundle: Path) -> None:
    with pytest.raises(BadInput, match="--device is cuda"):
        create_app([entities_bundle], ServeSettings(device="cuda"))
    for opened in (Pipeline, OfflinePool):
        with pytest.raises(BadInput, match="--device is cuda"):
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
    assert processes_of(ServeSettings(device="cuda")) == 1
    assert processes_of(ServeSettings(device="cuda", processes=3)) == 3


@pytest.mark.parametrize("device", ["gpu", "cuda:0", ""])
def test_a_device_of_another_name_is_refused_and_not_run_on_the_cpu(entities_bundle: Path, device: str) -> None:
    for opened in (Pipeline, OfflinePool):
        with pytest.raises(BadInput, match="give 'cpu' or 'cuda'"):
            opened(entities_bundle, device=device)  # type: ignore[arg-type]
