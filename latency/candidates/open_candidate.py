"""Opens a candidate in its runtime."""

from typing import get_args

from latency.candidates.candidate import Call, Candidate, Runtime
from latency.candidates.onnx_candidate import load_onnx
from serve.errors import BadInput


def load(candidate: Candidate) -> Call:
    """A function from inputs `{name: (batch, tokens) int64}` to the model's first output, float32, on the host.

    Inputs that the model does not take are ignored. The output is on the host, so the device has finished. Raises BadInput
    for a path that its runtime cannot open, and for an unavailable runtime or device.
    """
    if candidate.threads < 1:
        raise BadInput(f"candidate {candidate.name!r} was given {candidate.threads} threads; give it 1 or more")
    if candidate.runtime not in get_args(Runtime):
        raise BadInput(
            f"runtime {candidate.runtime!r} of candidate {candidate.name!r} is unknown; use one of {', '.join(get_args(Runtime))}"
        )
    if candidate.runtime.startswith("torch"):
        from latency.candidates.torch_candidate import load_torch

        return load_torch(candidate)
    return load_onnx(candidate)
