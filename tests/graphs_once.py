"""Exports of equal checkpoints are equal bytes (`tests/export/graph/test_exporter.py`), so a process of tests makes each once: torch
takes seconds for the smallest one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from export.graph import exporter
from serve.bundle.manifest import sha256_file


@contextmanager
def graphs_made_once(kept: Path) -> Iterator[None]:
    """Context in which commands of this process take the graph of a checkpoint that was exported before from the folder `kept`."""
    real = exporter.export_graph
    known: dict[tuple[object, ...], tuple[Path, exporter.GraphInfo]] = {}

    def export_graph(checkpoint: Path, out: Path, max_length: int) -> exporter.GraphInfo:
        files = sorted([*checkpoint.glob("*.safetensors"), *checkpoint.glob("config.json")])
        key = (max_length, *((file.name, sha256_file(file)) for file in files))
        if key not in known:
            info = real(checkpoint, out, max_length)
            known[key] = kept / f"{len(known)}.onnx", info
            shutil.copyfile(out, known[key][0])
            return info
        graph, info = known[key]
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(graph, out)
        return info

    with (
        patch("export.graph.exporter.export_graph", export_graph),
        patch("export.packing.variants.export_graph", export_graph),
        patch("stillroom.verbs.run.stages.export_graph", export_graph),
        patch("stillroom.student_search.machine_latency.export_graph", export_graph),
    ):
        yield
