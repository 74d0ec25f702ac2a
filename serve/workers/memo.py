"""Answers that are kept, and given again to the same text: exact, since on a CPU an answer depends on its request alone."""

import os
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from serve.bundle.manifest import Manifest
from serve.bundle.runtimes import Device, Runtime
from serve.text.answers import TextFacts
from serve.text.inputs import TextWork

# Of an answer, beside its own bytes: key, facts, and its places in tables that are up to six times as long as needed (470 were measured).
OVERHEAD_BYTES = 480
# OpenVINO computes a row nearly as long as `max_length` in another way, unless that is a multiple of it.
OPENVINO_TOKENS = 16


class Kept(NamedTuple):
    """An answer in JSON, and what the watch on drift must know of its text."""

    answer: bytes
    facts: TextFacts


class Memo:
    """Answers of this process to texts, at most `limit_bytes` with all that they cost. Those used longest ago go first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._secret = os.urandom(blake2b.MAX_KEY_SIZE)  # so that nobody can make two texts that share a hash
        self._encode = msgspec.msgpack.Encoder().encode
        self.held_bytes = 0

    def key(self, model: bytes, client: bytes, work: TextWork) -> bytes:
        """The key of what `model` answers to `work`, with its options, for `client`."""
        return blake2b(self._encode((model, client, work)), digest_size=16, key=self._secret).digest()

    def get(self, key: bytes) -> Kept | None:
        """What is kept under `key`."""
        kept = self._kept.get(key)
        if kept:
            self._kept.move_to_end(key)
        return kept

    def put(self, key: bytes, answer: bytes, facts: TextFacts) -> None:
        """Keeps an answer, if there is room for it when others go."""
        size = OVERHEAD_BYTES + len(answer)
        if key in self._kept or size > self.limit_bytes:
            return
        self._kept[key] = Kept(answer, facts)
        self.held_bytes += size
        while self.held_bytes > self.limit_bytes:
            self.held_bytes -= OVERHEAD_BYTES + len(self._kept.popitem(last=False)[1].answer)

    def clear(self) -> None:
        """Drops all answers."""
        self._kept = OrderedDict()
        self.held_bytes = 0


def reason_to_forget(manifest: Manifest, variant: str, runtime: Runtime, device: Device) -> str:
    """Why an answer of `variant` in this runtime may depend on the texts beside it, so that none is kept; empty if it does not."""
    if device != "cpu":
        return f"on {device} an answer may depend on the texts beside it; leave --memo-mib out"
    if manifest.variants[variant].scheme == "dynamic":
        return "an answer of dynamic int8 depends on the texts beside it; export int8 with fixed scales, or give --variant fp32"
    if runtime == "openvino" and manifest.max_length % OPENVINO_TOKENS:
        return (
            f"in OpenVINO an answer to a text of nearly {manifest.max_length} tokens depends on the texts beside it; export with a "
            f"--max-length that is a multiple of {OPENVINO_TOKENS}"
        )
    name = variant if runtime == "onnxruntime" else f"{variant} {runtime}"
    measured = manifest.parity.get(name)
    if not isinstance(measured, dict) or measured.get("company_differences") != 0:
        return (
            f"the manifest has no parity of {name!r} with company_differences of 0, so an answer may depend on the texts beside it; "
            "export the bundle again, or leave --memo-mib out"
        )
    return ""
