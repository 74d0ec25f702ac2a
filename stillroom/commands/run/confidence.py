"""How far the probabilities of a run's graphs hold: what the export chose on validation, read again on test."""

from pathlib import Path
from typing import Any

import numpy as np

from compress.data.encoded import Encoded
from export.precision.int8_search import session_logits
from export.validation.parity import Precision
from export.validation.temperature import Confidence, Reliability
from serve.bundle.manifest import ONNX_NAMES
from serve.model.session import Session
from stillroom.inputs.preflight import RunInputs

GRAPHS: dict[Precision, str] = {"fp32": ONNX_NAMES["fp32"], "int8": ONNX_NAMES["int8"]}


def confidence_of(exported: dict[str, Any]) -> dict[Precision, Confidence]:
    """The temperatures and thresholds that the stage `export` chose, from its `export.json`."""
    return {graph: Confidence.read(exported["confidence"][graph]) for graph in GRAPHS}


def graph_logits(inputs: RunInputs, folders: dict[str, Path], graph: Precision, encoded: Encoded) -> list[np.ndarray]:
    """What `graph` says of the texts of `encoded`: the logits of each one's rows."""
    return session_logits(Session(folders["export"] / GRAPHS[graph], inputs.recipe.threads), encoded)


def reliability_on_test(
    inputs: RunInputs, folders: dict[str, Path], exported: dict[str, Any], said: dict[str, list[np.ndarray]]
) -> dict[Precision, Reliability]:
    """How far the probabilities of the graphs hold on test, of which they have `said` this, and on its texts out of scope."""
    outside = inputs.out_of_scope("test")
    return {
        graph: chosen.on(inputs.test, said[graph], graph_logits(inputs, folders, graph, outside) if outside else [])
        for graph, chosen in confidence_of(exported).items()
    }


def on_test(scores: dict[str, Any]) -> dict[Precision, Reliability]:
    """What the stage `scores` has of `reliability_on_test`; nothing when a gate left test unread."""
    found = scores.get("reliability", {})
    return {graph: Reliability(**found[graph]) for graph in GRAPHS if graph in found}
