"""Makes the candidates of `profile`: each model of the command line on every requested device and runtime."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from compress.models.configurations import LONGEST_TEXT, check_stated, position_limit, usual_length
from compress.models.sentence_pooling import MODULES, max_tokens_in
from latency.candidates.candidate import Candidate, Reads, Runtime, missing
from serve.bundle.manifest import MANIFEST
from serve.bundle.runtimes import Device, has_openvino
from serve.errors import BadInput
from serve.tasks import open_bundle
from serve.text.labels import MULTI_LABEL, SPAN_ENDS, gives_number
from serve.text.tokenizer import load_tokenizer
from stillroom.verbs.profile import TorchPrecision

LABELS: dict[Runtime, str] = {
    "torch": "torch",
    "torch-compile": "torch.compile",
    "torch-cuda-graphs": "CUDA graphs",
    "onnxruntime": "ORT",
    "onnxruntime-tensorrt": "TensorRT",
    "openvino": "OpenVINO",
}
ON_CUDA_ALONE: tuple[Runtime, ...] = ("torch-cuda-graphs", "onnxruntime-tensorrt")
ON_CPU_ALONE: tuple[Runtime, ...] = ("openvino",)
GRAPHS = "graphs"  # in the work folder: graphs that are exported only for timing
UNNAMED = {"0": "LABEL_0", "1": "LABEL_1"}  # the default labels of transformers

Notify = Callable[[str], None]
Way = tuple[Device, Runtime]
INT8_IS_SLOW: Way = ("cuda", "onnxruntime")  # which has no fast kernels for it on a GPU


@dataclass(frozen=True)
class Ways:
    """The devices and runtimes to run models in, as far as these go together."""

    devices: tuple[Device, ...] = ("cpu",)
    runtimes: tuple[Runtime, ...] = ()
    """Empty: torch and onnxruntime for checkpoints, the pinned runtime for bundles; on a GPU all three torch runtimes."""
    precisions: tuple[TorchPrecision, ...] = ()
    """Of torch; graphs have those of their files. Empty: fp32."""
    threads: int = 1
    half_on_cuda: bool = False
    """Whether torch runs in fp16 too on a GPU, if no precision is given."""

    def precisions_on(self, device: Device) -> tuple[TorchPrecision, ...]:
        """The precisions of torch on `device`."""
        return self.precisions or (("fp32", "fp16") if self.half_on_cuda and device == "cuda" else ("fp32",))

    def in_torch(self) -> list[Way]:
        """The devices and runtimes in which torch runs a checkpoint."""
        every: dict[Device, tuple[Runtime, ...]] = {
            "cpu": ("torch",),
            "cuda": ("torch", "torch-compile", "torch-cuda-graphs"),
        }
        return [
            (device, runtime)
            for device in self.devices
            for runtime in self.runtimes or every[device]
            if runtime.startswith("torch") and (device == "cuda" or runtime not in ON_CUDA_ALONE)
        ]

    def of_graph(self, runtimes: Sequence[Runtime], left_out: Notify) -> list[Way]:
        """The devices and runtimes for a graph, out of `runtimes`, that this machine has; `left_out` gets what the others lack."""
        every = [
            (device, runtime)
            for device in self.devices
            for runtime in runtimes
            if not runtime.startswith("torch")
            and (device == "cuda" or runtime not in ON_CUDA_ALONE)
            and (device == "cpu" or runtime not in ON_CPU_ALONE)
        ]
        return _here(every, left_out)


class _Model(NamedTuple):
    """A model of the command line, how it reads texts (None: it does not), and its longest text in tokens, if that is known."""

    path: Path
    reads: Reads | None
    max_length: int | None


def candidates_of(
    model: Path,
    ways: Ways,
    work: Path,
    calibration: Sequence[str],
    say: Notify = lambda _: None,
    left_out: Notify = lambda _: None,
) -> list[Candidate]:
    """The candidates of `model` on this machine: a bundle, a checkpoint's folder or an .onnx file.

    Graphs of a checkpoint are exported under `work` and kept there for later calls; its int8 graph is calibrated on
    `calibration` texts. `left_out` is called with what is not timed and why: what is not installed, and int8 on a GPU.
    Raises BadInput for any other model.
    """
    if model.suffix == ".onnx" and model.is_file():
        return _of_file(model, ways, left_out)
    if (model / MANIFEST).is_file():
        return _of_bundle(model, ways, left_out)
    check_model(model)
    return _of_checkpoint(model, ways, work, calibration, say, left_out)


def check_model(model: Path) -> None:
    """Checks that `model` can be profiled.

    Raises BadInput: it does not exist, is of another kind, or is a checkpoint that is damaged or has labels that no verb reads.
    """
    if (model.suffix == ".onnx" and model.is_file()) or (model / MANIFEST).is_file():
        return
    if (model / "config.json").is_file():
        from compress.models.pretrained import check_checkpoint, check_labels
        from compress.tasks import task_named

        reads, _ = _reads(model)
        check_checkpoint(model, str(model))
        if reads:
            check_labels(reads.labels, task_named(reads.task), str(model))
        return
    what = "is neither a bundle, nor a checkpoint's folder, nor an .onnx file" if model.exists() else "does not exist"
    raise BadInput(
        f"{model} {what}. Give a bundle (`stillroom run` and `export` write them), the folder of a transformers checkpoint, or an "
        ".onnx file."
    )


def task_of(model: Path) -> str | None:
    """The task of `model`'s head. None where it has no head, or no configuration beside it names one."""
    if (model / MANIFEST).is_file():
        return open_bundle(model).manifest.task
    places = (model,) if model.is_dir() else (model.parent, model.parent.parent)
    beside = next((place for place in places if (place / "config.json").is_file()), None)
    reads = _reads(beside)[0] if beside else None
    return reads.task if reads else None


def _of_bundle(folder: Path, ways: Ways, left_out: Notify) -> list[Candidate]:
    bundle = open_bundle(folder)
    manifest = bundle.manifest
    reads = Reads(bundle.path, manifest.task, tuple(manifest.labels), manifest.multi_label)
    model = _Model(folder, reads, manifest.max_length)
    found: list[Candidate] = []
    if ways.runtimes and ways.in_torch():
        if all((folder / file).is_file() for file in ("config.json", "model.safetensors")):
            found += _in_torch(model, ways, left_out)
        else:
            left_out(f"{folder} has no model.safetensors for torch; give the checkpoint's own folder")
    for name, variant in manifest.variants.items():
        pinned: Runtime = "openvino" if variant.runtime == "openvino" and has_openvino() else "onnxruntime"
        runtimes = ways.runtimes or (pinned,)
        if "weight-only" in variant.scheme:  # only onnxruntime has its operators
            runtimes = tuple(each for each in runtimes if each == "onnxruntime")
        found += _graph(model, name, bundle.onnx_file(name), ways.of_graph(runtimes, left_out), ways.threads, left_out)
    if folder.name == manifest.digest:  # the cache of URLs names its folders so
        found = [replace(each, name=each.name.replace(manifest.digest, manifest.name, 1)) for each in found]
    return found


def _of_file(file: Path, ways: Ways, left_out: Notify) -> list[Candidate]:
    """An ONNX file. It can answer texts if a tokenizer and a configuration with labels lie in its folder or the one above."""
    name = file.stem.lower()
    precision = "int8" if "int8" in name or "quantized" in name else "fp16" if "fp16" in name else "fp32"
    beside = next((place for place in (file.parent, file.parent.parent) if (place / "config.json").is_file()), None)
    model = _Model(file, *(_reads(beside) if beside else (None, None)))
    here = ways.of_graph(ways.runtimes or ("onnxruntime",), left_out)
    return _graph(model, precision, file, here, ways.threads, left_out)


def _of_checkpoint(
    folder: Path, ways: Ways, work: Path, calibration: Sequence[str], say: Notify, left_out: Notify
) -> list[Candidate]:
    reads, length = _reads(folder)
    model = _Model(folder, reads, length)
    found = _in_torch(model, ways, left_out)
    here = ways.of_graph(ways.runtimes or ("onnxruntime",), left_out)
    if here and reads:
        int8 = any(way != INT8_IS_SLOW for way in here)
        files = _exported(folder, length, work, calibration, ways.threads, say, int8=int8)
        for precision, file in files.items():
            found += _graph(model, precision, file, here, ways.threads, left_out)
    return found


def _in_torch(model: _Model, ways: Ways, left_out: Notify) -> list[Candidate]:
    return [
        _candidate(model, way, precision, model.path, ways.threads)
        for way in _here(ways.in_torch(), left_out)
        for precision in ways.precisions_on(way[0])
    ]


def _graph(
    model: _Model, precision: str, file: Path, ways: Sequence[Way], threads: int, left_out: Notify
) -> list[Candidate]:
    if precision == "int8" and INT8_IS_SLOW in ways:
        left_out(
            "int8 in onnxruntime on cuda: it has no fast kernels for it there; time fp16, or int8 with --device cpu"
        )
        ways = [way for way in ways if way != INT8_IS_SLOW]
    return [_candidate(model, way, precision, file, threads) for way in ways]


def _candidate(model: _Model, way: Way, precision: str, file: Path, threads: int) -> Candidate:
    device, runtime = way
    name = f"{model.path.name or model.path.resolve().name} {LABELS[runtime]} {precision}"
    on_device = f"{name} cuda" if device == "cuda" else name
    return Candidate(on_device, runtime, precision, file, threads, device, model.max_length, model.reads)


def _here(asked: Sequence[Way], left_out: Notify) -> list[Way]:
    """The requested devices and runtimes that this machine has; `left_out` is called with what the others lack."""
    found = []
    for device, runtime in asked:
        if lacks := missing(runtime, device):
            left_out(lacks)
        else:
            found.append((device, runtime))
    return found


def _reads(folder: Path) -> tuple[Reads | None, int]:
    """The tokenizer folder, task and labels of the model in `folder` (None without a head), and its longest text in tokens."""
    check_stated(folder, str(folder))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        limit = position_limit(SimpleNamespace(**{"model_type": "", "pad_token_id": 1, **config}))
        length = min(usual_length(folder), limit or LONGEST_TEXT)
        heads = " ".join(config.get("architectures") or [])
        labels = config.get("id2label") or UNNAMED  # transformers does not save the default ones
        names = tuple(labels[key] for key in sorted(labels, key=int))
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{folder}: its config.json cannot be read ({type(error).__name__}: {error}). "
            "Copy the folder again, or save the model again with save_pretrained."
        ) from None
    if not (folder / "tokenizer.json").is_file():
        return None, length
    multi_label = config.get("problem_type") == MULTI_LABEL
    if "ForTokenClassification" in heads:
        return Reads(folder, "token-classification", names), length
    if "ForQuestionAnswering" in heads:
        return Reads(folder, "question-answering", SPAN_ENDS), length
    if "ForSequenceClassification" in heads:
        numbers = gives_number(config.get("problem_type"), len(names))
        return Reads(folder, "text-regression" if numbers else "text-classification", names, multi_label), length
    if (folder / MODULES).is_file():
        return Reads(folder, "feature-extraction", ()), max_tokens_in(folder, length)
    return None, length


def _exported(
    folder: Path, length: int, work: Path, calibration: Sequence[str], threads: int, say: Notify, *, int8: bool
) -> dict[str, Path]:
    """The checkpoint's fp32 graph and, with `int8`, the int8 graph, statically quantised as in a bundle, without gate or repair."""
    from compress.runs.stages import folder_fingerprint, texts_fingerprint
    from export.graph.exporter import export_graph
    from export.precision.calibration import with_long_texts
    from export.precision.int8 import quantise_static
    from export.precision.int8_preparation import Prepared

    graph_fingerprint = f"{folder_fingerprint(folder)}:{texts_fingerprint(calibration)}"
    place = work / GRAPHS / hashlib.sha256(graph_fingerprint.encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    files = {"fp32": place / "model.onnx"} | ({"int8": place / "model_quantized.onnx"} if int8 else {})
    # Touched last, so that what a killed export left is made again.
    unmade = [name for name in files if not (place / f"{name}.done").is_file()]
    if unmade:
        say(f"exporting {folder.name} to ONNX, {' and '.join(unmade)}, to time it")
    if "fp32" in unmade:
        export_graph(folder, files["fp32"], length)
        (place / "fp32.done").touch()
    if "int8" in unmade:
        encodings = with_long_texts(load_tokenizer(folder, length).encode_batch(list(calibration)), length)
        prepared = Prepared.of(files["fp32"], encodings, threads)
        quantise_static(prepared.model, files["int8"], prepared.ranges, clipped=True)
        (place / "int8.done").touch()
    return files
