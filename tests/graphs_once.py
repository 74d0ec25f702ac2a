"""Exports of equal checkpoints are equal bytes (`tests/export/graph/test_exporter.py`), so the processes of one run of the tests make
each once: torch takes seconds for the smallest one. So do the peaks of this machine, which a process of their own measures."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from export.graph import exporter
from latency.analysis import roofline
from serve.files import locked


@contextmanager
def graphs_made_once(kept: Path) -> Iterator[None]:
    """Context in which commands of this process take a graph that was exported before, and peaks, from the folder `kept`."""
    real = exporter.export_graph

    def export_graph(checkpoint: Path, out: Path, max_length: int) -> exporter.GraphInfo:
        files = [*checkpoint.glob("*.safetensors"), *checkpoint.rglob("config.json"), *checkpoint.glob("modules.json")]
        digest = hashlib.sha256(str(max_length).encode())
        for file in sorted(files):
            digest.update(file.relative_to(checkpoint).as_posix().encode() + file.read_bytes())
        graph, about = (kept / f"{digest.hexdigest()}.{kind}" for kind in ("onnx", "info"))
        with locked(graph.with_suffix(".lock")):
            if not about.exists():
                info = real(checkpoint, out, max_length)
                shutil.copyfile(out, graph)
                about.write_bytes(pickle.dumps(info))
                return info
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(graph, out)
        info = pickle.loads(about.read_bytes())  # noqa: S301
        assert isinstance(info, exporter.GraphInfo)
        return info

    def measured_peaks(threads: int, seconds: float) -> dict[str, Any]:
        found = kept / f"peaks-{threads}.json"
        with locked(found.with_suffix(".lock")):
            if not found.exists():
                found.write_text(json.dumps(roofline.measured_peaks(threads, seconds)))
        peaks: dict[str, Any] = json.loads(found.read_text())
        return peaks

    with (
        patch("stillroom.verbs.profile.run.measured_peaks", measured_peaks),
        patch("export.graph.exporter.export_graph", export_graph),
        patch("export.packing.variants.export_graph", export_graph),
        patch("stillroom.verbs.run.stages.export_graph", export_graph),
        patch("stillroom.student_search.machine_latency.export_graph", export_graph),
    ):
        yield
