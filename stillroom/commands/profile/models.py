"""What a person names on `profile`'s command line, as candidates: each model in every runtime that it is asked for in."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from export.graph.exporter import position_limit
from latency.candidates.availability import missing
from latency.candidates.candidate import Candidate, Device, Reads, Runtime
from serve.bundle.manifest import MANIFEST, open_bundle
from serve.bundle.runtimes import has_openvino
from serve.errors import BadInput
from serve.text.labels import MULTI_LABEL
from serve.text.tokenizer import load_tokenizer
from stillroom.settings.profile import TorchPrecision

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
LONGEST = 512  # tokens; what `run` and `export` cut texts at
GRAPHS = "graphs"  # under the work folder: what was exported only to be timed
UNNAMED = {"0": "LABEL_0", "1": "LABEL_1"}  # what transformers calls two classes that nobody named

Told = Callable[[str], None]
Way = tuple[Device, Runtime]


@dataclass(frozen=True)
class Ways:
    """In what models are run: on every device in every runtime, as far as these go together."""

    devices: tuple[Device, ...] = ("cpu",)
    runtimes: tuple[Runtime, ...] = ()
    """None given: torch and onnxruntime for checkpoints, for bundles what they pin; on a GPU every way that torch has."""
    precisions: tuple[TorchPrecision, ...] = ()
    """Of torch; graphs have those of their files. None given: fp32."""
    threads: int = 1
    half_on_cuda: bool = False
    """Where no precision is given: whether torch runs in fp16 too on a GPU."""

    def precisions_on(self, device: Device) -> tuple[TorchPrecision, ...]:
        """The arithmetic of torch there."""
        return self.precisions or (("fp32", "fp16") if self.half_on_cuda and device == "cuda" else ("fp32",))

    def in_torch(self) -> list[Way]:
        """Where and how torch is to run a checkpoint."""
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

    def of_graph(self, runtimes: Sequence[Runtime]) -> list[Way]:
        """Where a graph is to run that is timed in `runtimes`."""
        return [
            (device, runtime)
            for device in self.devices
            for runtime in runtimes
            if (device == "cuda" or runtime not in ON_CUDA_ALONE) and (device == "cpu" or runtime not in ON_CPU_ALONE)
        ]


def candidates_of(
    model: Path,
    ways: Ways,
    work: Path,
    calibration: Sequence[str],
    say: Told = lambda _: None,
    left_out: Told = lambda _: None,
) -> list[Candidate]:
    """Every candidate that `model`, a bundle, a checkpoint's folder or an .onnx file, gives on this machine.

    Graphs of a checkpoint are exported under `work`, where they are found again; its int8 graph is calibrated on
    `calibration` texts. `left_out` is told what is not installed for the ways that were asked for, which give no candidate.
    Raises BadInput for anything else, and for a checkpoint that has no fast tokenizer.
    """
    if model.suffix == ".onnx" and model.is_file():
        return _of_file(model, ways, left_out)
    if (model / MANIFEST).is_file():
        return _of_bundle(model, ways, left_out)
    check_model(model)
    return _of_checkpoint(model, ways, work, calibration, say, left_out)


def check_model(model: Path) -> None:
    """Nothing, when `model` is one that can be profiled.

    Raises:
        BadInput: it is not there, or something else, or a checkpoint that is damaged.
    """
    if (model.suffix == ".onnx" and model.is_file()) or (model / MANIFEST).is_file():
        return
    if (model / "config.json").is_file():
        from compress.models.pretrained import check_checkpoint

        _reads(model)
        check_checkpoint(model, str(model))
        return
    what = "is neither a bundle, nor a checkpoint's folder, nor an .onnx file" if model.exists() else "does not exist"
    raise BadInput(
        f"{model} {what}. Give a bundle, as `stillroom run` or `export` writes it, the folder of a transformers checkpoint, or an "
        ".onnx file."
    )


def task_of(model: Path) -> str | None:
    """The task of `model`'s head, None where it has none, or none that can be known from what lies beside it."""
    if (model / MANIFEST).is_file():
        return open_bundle(model).manifest.task
    places = (model,) if model.is_dir() else (model.parent, model.parent.parent)
    beside = next((place for place in places if (place / "config.json").is_file()), None)
    reads = _reads(beside)[0] if beside else None
    return reads.task if reads else None


def _of_bundle(folder: Path, ways: Ways, left_out: Told) -> list[Candidate]:
    bundle = open_bundle(folder)
    manifest = bundle.manifest
    reads = Reads(bundle.path, manifest.task, tuple(manifest.labels), manifest.multi_label)
    found = []
    if ways.runtimes and ways.in_torch():
        if all((folder / file).is_file() for file in ("config.json", "model.safetensors")):
            found += _in_torch(folder, reads, manifest.max_length, ways, left_out)
        else:
            left_out(f"{folder} holds no checkpoint for torch (model.safetensors): give the checkpoint's own folder")
    for name, variant in manifest.variants.items():
        pinned: Runtime = "openvino" if variant.runtime == "openvino" and has_openvino() else "onnxruntime"
        runtimes = ways.runtimes or (pinned,)
        if "weight-only" in variant.scheme:  # its operators are onnxruntime's own
            runtimes = tuple(each for each in runtimes if each == "onnxruntime")
        graph_ways = _here(ways.of_graph(_of_graphs(runtimes)), left_out)
        found += _graph(folder, name, bundle.onnx_file(name), graph_ways, ways.threads, reads, manifest.max_length)
    return found


def _of_file(file: Path, ways: Ways, left_out: Told) -> list[Candidate]:
    """An ONNX file on its own; text can be read where a tokenizer and a configuration with labels lie beside or above it."""
    name = file.stem.lower()
    precision = "int8" if "int8" in name or "quantized" in name else "fp16" if "fp16" in name else "fp32"
    beside = next((place for place in (file.parent, file.parent.parent) if (place / "config.json").is_file()), None)
    reads, length = _reads(beside) if beside else (None, None)
    graph_ways = _here(ways.of_graph(_of_graphs(ways.runtimes or ("onnxruntime",))), left_out)
    return _graph(file, precision, file, graph_ways, ways.threads, reads, length)


def _of_checkpoint(
    folder: Path, ways: Ways, work: Path, calibration: Sequence[str], say: Told, left_out: Told
) -> list[Candidate]:
    reads, length = _reads(folder)
    found = _in_torch(folder, reads, length, ways, left_out)
    graph_ways = _here(ways.of_graph(_of_graphs(ways.runtimes or ("onnxruntime",))), left_out)
    if graph_ways and reads:
        files = _exported(folder, length, work, calibration, ways.threads, say)
        for precision, file in files.items():
            found += _graph(folder, precision, file, graph_ways, ways.threads, reads, length)
    return found


def _of_graphs(runtimes: Sequence[Runtime]) -> list[Runtime]:
    return [runtime for runtime in runtimes if not runtime.startswith("torch")]


def _here(asked: Sequence[Way], left_out: Told) -> list[Way]:
    """Those of the ways that were asked for that this machine has; `left_out` is told why it lacks the others."""
    found = []
    for device, runtime in asked:
        if lacks := missing(runtime, device):
            left_out(lacks)
        else:
            found.append((device, runtime))
    return found


def _in_torch(folder: Path, reads: Reads | None, length: int | None, ways: Ways, left_out: Told) -> list[Candidate]:
    return [
        Candidate(
            _name(folder, runtime, precision, device), runtime, precision, folder, ways.threads, device, length, reads
        )
        for device, runtime in _here(ways.in_torch(), left_out)
        for precision in ways.precisions_on(device)
    ]


def _graph(
    model: Path,
    precision: str,
    file: Path,
    ways: Sequence[Way],
    threads: int,
    reads: Reads | None,
    length: int | None,
) -> list[Candidate]:
    return [
        Candidate(_name(model, runtime, precision, device), runtime, precision, file, threads, device, length, reads)
        for device, runtime in ways
    ]


def _name(model: Path, runtime: Runtime, precision: str, device: Device) -> str:
    named = model.name or model.resolve().name
    return f"{named} {LABELS[runtime]} {precision}" + (" cuda" if device == "cuda" else "")


def _reads(folder: Path) -> tuple[Reads | None, int]:
    """How the model in `folder` reads text and what its labels are, None without a head; and its longest text in tokens."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        limit = position_limit(SimpleNamespace(**{"model_type": "", "pad_token_id": 0, **config}))
        length = min(LONGEST, limit or LONGEST)
        heads = " ".join(config.get("architectures") or [])
        labels = config.get("id2label") or UNNAMED  # transformers leaves these out when it saves
        names = tuple(labels[key] for key in sorted(labels, key=int))
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{folder}: its config.json cannot be read ({type(error).__name__}: {error}). "
            "Copy the folder again, or save the model anew with save_pretrained."
        ) from None
    if not (folder / "tokenizer.json").is_file():
        return None, length
    multi_label = config.get("problem_type") == MULTI_LABEL
    if "ForTokenClassification" in heads:
        return Reads(folder, "token-classification", names), length
    if "ForSequenceClassification" in heads:
        return Reads(folder, "text-classification", names, multi_label), length
    return None, length


def _exported(
    folder: Path, length: int, work: Path, calibration: Sequence[str], threads: int, say: Told
) -> dict[str, Path]:
    """The checkpoint's fp32 graph and its int8 one, statically quantised as a bundle's would be, without gate or repair."""
    from compress.engine.fingerprints import folder_fingerprint, texts_fingerprint
    from export.graph.exporter import export_graph
    from export.precision.calibration import with_long_texts
    from export.precision.int8 import quantise_static
    from export.precision.int8_search import Prepared

    graph_fingerprint = f"{folder_fingerprint(folder)}:{texts_fingerprint(calibration)}"
    place = work / GRAPHS / hashlib.sha256(graph_fingerprint.encode()).hexdigest()[:16]
    fp32, int8 = place / "model.onnx", place / "model_quantized.onnx"
    if not (place / "done").is_file():
        place.mkdir(parents=True, exist_ok=True)
        say(f"exporting {folder.name} to ONNX, fp32 and int8, to time it")
        export_graph(folder, fp32, length)
        tokenizer = load_tokenizer(folder, length)
        encodings = with_long_texts(tokenizer.encode_batch(list(calibration)), length)
        prepared = Prepared.of(fp32, encodings, threads)
        quantise_static(prepared.model, int8, prepared.ranges, clipped=True)
        (place / "done").touch()  # last: a killed export is made again
    return {"fp32": fp32, "int8": int8}
