import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from repository import ROOT
from server_process import serving

from serve.bundle.cpu import HIDDEN_VARIABLE, cpu_features, suits
from serve.bundle.manifest import Bundle
from serve.bundle.runtimes import choose
from serve.errors import BadInput, BundleError
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle

Copy = Callable[[Path], Path]
Writer = Callable[..., None]

# What Linux says of an Intel processor of 2015, and of one of 2023.
OLD = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu sse2 avx avx2 fma\n"
NEW = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma avx512f avx512_vnni amx_int8\n"
VNNI = ["avx512_vnni", "avx_vnni", "amx_int8", "arm64"]
FILE = "onnx/model.onnx"


@pytest.fixture
def eight_bits(entities_bundle: Path, copied: Copy, manifest_writer: Writer) -> Path:
    """A bundle whose default variant needs VNNI."""
    folder = copied(entities_bundle)
    fp32 = {"file": FILE, "scheme": "fp32", "runtime": "onnxruntime", "cpu": []}
    int8 = {"file": FILE, "scheme": "static", "runtime": "onnxruntime", "cpu": VNNI}
    manifest_writer(folder, variants={"fp32": fp32, "int8": int8}, default_variant="int8")
    return folder


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


def test_a_server_is_not_started_with_an_unknown_feature_to_hide(eight_bits: Path) -> None:
    command = [sys.executable, "-m", "serve", str(eight_bits), "--port", "0"]
    environment = {**os.environ, HIDDEN_VARIABLE: "avx512vnni"}
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("error: STILLROOM_HIDE_CPU_FEATURES names avx512vnni, which is unknown")


def test_an_arm_can_be_hidden_too(tmp_path: Path) -> None:
    assert cpu_features(tmp_path / "nowhere", "aarch64", {HIDDEN_VARIABLE: "arm64"}) == frozenset()


def test_a_server_whose_features_are_hidden_answers_as_an_older_processor_would(eight_bits: Path) -> None:
    with serving(eight_bits, environment={HIDDEN_VARIABLE: ",".join(VNNI)}) as server:
        answer = httpx.post(f"{server.url}/v1/entities", json={"text": "fly to rome"}, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["variant"]) == (200, "fp32")
        assert any("needs a processor with one of avx512_vnni" in line for line in server.log())


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


def test_an_old_processor_refuses_what_was_asked_for(eight_bits: Path) -> None:
    with pytest.raises(BundleError, match=r"its 8-bit sums would saturate.*name another variant"):
        choose(open_bundle(eight_bits), "int8", features=["avx2"])


def test_without_fp32_an_old_processor_serves_nothing(eight_bits: Path, manifest_writer: Writer) -> None:
    int8 = {"file": FILE, "scheme": "static", "runtime": "onnxruntime", "cpu": VNNI}
    manifest_writer(eight_bits, variants={"int8": int8}, default_variant="int8")
    with pytest.raises(BundleError, match="its 8-bit sums would saturate"):
        choose(open_bundle(eight_bits), features=["avx2"])


def pinned_to(runtime: str, scheme: str, folder: Path, manifest_writer: Writer) -> Bundle:
    variant = {"file": FILE, "scheme": scheme, "runtime": runtime, "cpu": []}
    manifest_writer(folder, variants={"fp32": variant}, default_variant="fp32")
    return open_bundle(folder)


def test_onnxruntime_stands_in_for_openvino_and_a_note_says_so(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer
) -> None:
    bundle = pinned_to("openvino", "fp32", copied(entities_bundle), manifest_writer)
    assert choose(bundle, openvino=True) == ("fp32", "openvino", ())
    variant, runtime, (note,) = choose(bundle, openvino=False)
    assert (variant, runtime) == ("fp32", "onnxruntime")
    assert "pip install '.[openvino]'" in note


def test_openvino_gives_the_same_entities(entities_bundle: Path, copied: Copy, manifest_writer: Writer) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    folder = copied(entities_bundle)
    pinned_to("openvino", "fp32", folder, manifest_writer)
    pipeline = Pipeline(folder, threads=1)
    assert pipeline.session.runtime == "openvino"
    assert pipeline("fly from rome to new york") == Pipeline(entities_bundle, threads=1)("fly from rome to new york")


def test_a_runtime_that_nobody_knows_is_refused(entities_bundle: Path, copied: Copy, manifest_writer: Writer) -> None:
    bundle = pinned_to("tvm", "fp32", copied(entities_bundle), manifest_writer)
    with pytest.raises(BundleError, match="is for the runtime 'tvm'; this program has onnxruntime and openvino"):
        choose(bundle)


def test_whoever_serves_dynamic_int8_is_told_what_it_does(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(entities_bundle)
    pinned_to("onnxruntime", "dynamic", folder, manifest_writer)
    with caplog.at_level(logging.WARNING, logger="serve"):
        Pipeline(folder, threads=1)
    assert "depends on the other texts in its batch" in caplog.text
