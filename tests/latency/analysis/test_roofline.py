import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper
from patience import PATIENCE_S
from processes import started
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from compress.models.families import FAMILIES
from latency.analysis import roofline
from latency.analysis.roofline import KINDS, flops_per_text, measured_peaks, parameters, weights_read_bytes
from latency.measure.interleave import timing_environment
from serve.errors import BadInput, InternalError

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 112}
CONFIGS = {
    "bert": ("BertConfig", SIZES),
    "roberta": ("RobertaConfig", SIZES),
    "xlm-roberta": ("XLMRobertaConfig", SIZES),
    "electra": ("ElectraConfig", {**SIZES, "embedding_size": 24}),
    "mpnet": ("MPNetConfig", SIZES),
    "distilbert": ("DistilBertConfig", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 112}),
    "modernbert": ("ModernBertConfig", {**SIZES, "global_attn_every_n_layers": 2, "local_attention": 8}),
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def model_of(kind: str, head: str, labels: int, **changes: Any) -> Any:
    name, sizes = CONFIGS[kind]
    shape = {"vocab_size": 60, "max_position_embeddings": 48, "num_labels": labels, **SPECIAL, **sizes, **changes}
    config = getattr(transformers, name)(**shape)
    opener = getattr(transformers, f"AutoModelFor{head}")
    return opener.from_config(config, attn_implementation="eager").eval()


def described(model: Any) -> dict[str, object]:
    """Its config.json."""
    config: dict[str, object] = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return config


def test_all_families_that_can_be_distilled_are_counted() -> None:
    assert set(KINDS) == set(FAMILIES) == set(CONFIGS)


@pytest.mark.parametrize("head", ["TokenClassification", "SequenceClassification"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_operations_are_those_that_torch_counts(kind: str, head: str) -> None:
    model = model_of(kind, head, labels=9)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.full((1, 40), 5), attention_mask=torch.ones(1, 40, dtype=torch.int64))
    counted = counter.get_total_flops()
    # Rotary angles are a product in torch: one of each position with each frequency.
    slack = 3 * 40 * 64 / counted if kind == "modernbert" else 0
    assert flops_per_text(described(model), 40, labels=9) == pytest.approx(counted, rel=slack)


def test_a_family_or_a_size_that_is_not_known_is_refused_by_name() -> None:
    for config, named in (({"model_type": "gpt2"}, "'gpt2'"), ({"model_type": "distilbert", "n_layers": 2}, "dim")):
        with pytest.raises(BadInput, match=named):
            flops_per_text(config, 8, labels=2)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_parameters_and_bytes_of_a_checkpoint_are_read_from_its_headers(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, "TokenClassification", labels=9).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert parameters(tmp_path) == expected
    tables = {name: table for name, table in model.named_parameters() if "_embeddings.weight" in name}
    rows = {name: min(40, len(table)) for name, table in tables.items()}
    not_read = sum((len(table) - rows[name]) * table.shape[1] for name, table in tables.items())
    assert not_read >= 20 * 64  # of the words; ModernBERT has no table of positions
    assert weights_read_bytes(tmp_path, 40) == 2 * (expected - not_read)


def test_indices_are_no_parameters_and_a_checkpoint_may_come_in_several_files(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(3, 5), "position_ids": torch.arange(7)}, tmp_path / "model-1.safetensors")
    save_file({"b.weight": torch.ones(4)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert parameters(tmp_path) == 19
    assert weights_read_bytes(tmp_path, 2) == 19 * 4 + 7 * 8


def test_a_graphs_weights_are_counted_by_their_own_widths_wherever_their_values_are(tmp_path: Path) -> None:
    def constant(name: str, kind: int, shape: list[int], values: bytes) -> TensorProto:
        return helper.make_tensor(name, kind, shape, values, raw=True)

    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
            helper.make_node("DequantizeLinear", ["codes", "scale"], ["weight"]),
            helper.make_node("MatMul", ["rows", "weight"], ["product"]),
            helper.make_node("Reshape", ["product", "shape"], ["logits"]),
        ],
        "small",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [
            constant("table", TensorProto.FLOAT, [100, 8], bytes(3200)),
            constant("codes", TensorProto.INT8, [8, 300], bytes(2400)),
            constant("scale", TensorProto.FLOAT, [], bytes(4)),
            constant("shape", TensorProto.INT64, [2], bytes(16)),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, tmp_path / "one.onnx")
    onnx.save(model, tmp_path / "two.onnx", save_as_external_data=True, location="two.data", size_threshold=100)
    (tmp_path / "two.data").unlink()  # not needed for counting
    for file in ("one.onnx", "two.onnx"):
        assert parameters(tmp_path / file) == 800 + 2400 + 1
        assert weights_read_bytes(tmp_path / file, 10) == 10 * 8 * 4 + 2400 + 4 + 16
        assert weights_read_bytes(tmp_path / file, 1000) == 3200 + 2400 + 4 + 16


def test_a_folder_without_weights_or_a_graph_without_onnx_gives_no_number_and_a_missing_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = tmp_path / "graph" / "model.onnx"
    graph.parent.mkdir()
    graph.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnx", None)
    for place in (tmp_path, graph):
        assert parameters(place) is None
        assert weights_read_bytes(place, 8) is None
    with pytest.raises(BadInput, match="gone does not exist"):
        parameters(tmp_path / "gone")


def test_peaks_are_measured_by_what_is_installed_and_with_a_library_that_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for absent in ("torch", "openvino"):
        (tmp_path / f"{absent}.py").write_text("raise ImportError('not here')\n")
    # An onnx that says how many threads it sees before it is the real one.
    (tmp_path / "onnx.py").write_text(
        "import os, sys\nprint('noise')\nassert os.environ['OMP_NUM_THREADS'] == '2'\n"
        f"sys.path.remove({str(tmp_path)!r})\ndel sys.modules['onnx']\nimport onnx\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\nsys.modules['onnx'] = onnx\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peaks = measured_peaks(2, seconds=0.05)
    assert peaks["threads"] == 2
    known = {"fp32_gflop_per_s", "int8_gflop_per_s"}  # onnxruntime computes it without OpenVINO
    assert known <= peaks.keys() - {"threads"} <= known | {"bandwidth_gb_per_s"}
    assert min(json.loads(json.dumps(peaks)).values()) > 0


def test_without_onnx_there_is_no_peak_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("torch", "onnx", "openvino"):
        monkeypatch.setitem(sys.modules, absent, None)
    peaks = roofline._peaks(1, 0.01)
    assert "fp32_gflop_per_s" in peaks
    assert "int8_gflop_per_s" not in peaks


def test_a_process_that_fails_or_takes_too_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise OSError('a library is broken')\n")
    with pytest.raises(InternalError, match=r"(?s)status 1.*a library is broken"):
        measured_peaks(1, seconds=0.05)
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(roofline, "START_TIMEOUT_S", 0.0)
    with pytest.raises(InternalError, match="peaks"):
        measured_peaks(1, seconds=0.05)
    with pytest.raises(BadInput, match="0 threads"):
        measured_peaks(0, seconds=1)


def test_there_is_no_bandwidth_without_the_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("float32", "bfloat16", "int8"):
        monkeypatch.setattr(roofline, f"_{kind}_products", lambda side, threads: [])
    assert set(roofline._peaks(1, 0.01)) == {"threads", "bandwidth_gb_per_s"}
    monkeypatch.setattr(roofline, "free_memory_bytes", lambda: 2**20)
    assert set(roofline._peaks(1, 0.01)) == {"threads"}


@pytest.mark.slow
def test_the_peaks_with_every_runtime() -> None:
    kinds = {f"{kind}_gflop_per_s" for kind in ("fp32", "bf16", "int8")}
    assert measured_peaks(1, seconds=1.0).keys() >= {"threads"} | kinds


def test_the_process_that_measures_peaks_ends_with_its_parent() -> None:
    command = [sys.executable, "-P", "-m", "latency.analysis.roofline", "1", "3600"]
    with started(command, stdin=subprocess.PIPE, env=timing_environment()) as process:
        assert process.stdin
        process.stdin.close()  # as by the end of its parent
        process.wait(PATIENCE_S)
