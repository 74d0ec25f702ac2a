"""How far the probabilities of a run's graphs hold: what the export chose on validation, read again on test."""

from pathlib import Path
from typing import Any

import numpy as np

from compress.tasks import Encoded
from export.confidence import Confidence, Reliability
from export.gate import session_logits
from export.pack import ONNX_NAMES
from export.parity import Precision
from serve.session import Session
from stillroom.ground import Ground

GRAPHS: dict[Precision, str] = {"fp32": ONNX_NAMES["fp32"], "int8": ONNX_NAMES["int8"]}


def confidence_of(exported: dict[str, Any]) -> dict[Precision, Confidence]:
    """The temperatures and thresholds that the stage `export` chose, from its `export.json`."""
    return {graph: Confidence.read(exported["confidence"][graph]) for graph in GRAPHS}


def graph_logits(ground: Ground, folders: dict[str, Path], graph: Precision, encoded: Encoded) -> list[np.ndarray]:
    """What `graph` says of the texts of `encoded`: the logits of each one's rows."""
    return session_logits(Session(folders["export"] / GRAPHS[graph], ground.recipe.threads), encoded)


def reliability_on_test(
    ground: Ground, folders: dict[str, Path], exported: dict[str, Any], said: dict[str, list[np.ndarray]]
) -> dict[Precision, Reliability]:
    """How far the probabilities of the graphs hold on test, of which they have `said` this, and on its texts out of scope."""
    outside = ground.out_of_scope("test")
    return {
        graph: chosen.on(ground.test, said[graph], graph_logits(ground, folders, graph, outside) if outside else [])
        for graph, chosen in confidence_of(exported).items()
    }


def on_test(scores: dict[str, Any]) -> dict[Precision, Reliability]:
    """What the stage `scores` has of `reliability_on_test`; nothing when a gate left test unread."""
    found = scores.get("reliability", {})
    return {graph: Reliability(**found[graph]) for graph in GRAPHS if graph in found}
