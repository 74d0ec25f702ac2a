"""The processes that answer the texts of one file: windows of texts in, their answers out, in batches of similar length."""

import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from serve.bundle.cpu import settle_threads
from serve.bundle.runtimes import Device, choose
from serve.errors import BadInput, BundleError, InternalError, StillroomError
from serve.tasks import open_bundle
from serve.text.inputs import TextWork, estimated_tokens
from serve.workers.served_model import processes_for
from stillroom.child_process import ChildProcesses, ProcessDied

if TYPE_CHECKING:
    from serve.model.pipeline import Pipeline

log = logging.getLogger("serve")

# Tokens in a batch: enough to fill the runs of the model, few enough that all processes end at nearly the same time.
BATCH_TOKENS, GPU_BATCH_TOKENS = 4096, 32_768
# Batches with which processes died this often are given up.
MOST_DEATHS = 3

Result = bytes | StillroomError


class Opening(NamedTuple):
    """What a worker process opens."""

    bundle: Path
    digest: str
    variant: str
    threads: int
    device: Device
    openvino: bool


class OfflinePool:
    """The worker processes of a bundle, within a `with` block.

    `variant`, `threads` and `device` are as in `Pipeline`, but `threads` is 1 by default; `processes` is by default as in
    `processes_for`. BundleError when the bundle is damaged, or its variant cannot run here; on entry, when a process cannot open it.
    BadInput on entry when a process dies.
    """

    def __init__(
        self,
        bundle_path: Path | str,
        *,
        variant: str | None = None,
        threads: int | None = None,
        processes: int | None = None,
        device: Device = "cpu",
    ) -> None:
        bundle = open_bundle(bundle_path)
        choice = choose(bundle, variant, device=device)
        for note in choice.notes:
            log.warning("%s", note)
        self.manifest, self.variant = bundle.manifest, choice.variant
        self.threads = threads or 1
        self.processes = processes or processes_for(device, self.threads)
        self.batch_tokens = GPU_BATCH_TOKENS if device == "cuda" else BATCH_TOKENS
        openvino = choice.runtime == "openvino"
        self._opening = Opening(bundle.path, bundle.manifest.digest, choice.variant, self.threads, device, openvino)

    def __enter__(self) -> "OfflinePool":
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._workers.end()

    def submit(self, works: Sequence[TextWork]) -> "Window":
        """Queues `works`."""
        return Window(self, works)

    def ask(self, works: list[TextWork]) -> Future[list[Result]]:
        """Queues one batch. The future raises ProcessDied, or what stops another process from being started."""
        return self._workers.submit(_answers, works)

    def _start(self) -> None:
        self._workers = ChildProcesses(self.processes, _begin, (self._opening,))
        try:
            fault = self._workers.submit(_fault).result()
        except ProcessDied as error:
            self._workers.end()
            if self._opening.openvino:  # it has crashed on some processors
                log.error("OpenVINO cannot run %s here, and onnxruntime runs it instead", self._opening.bundle)
                self._opening = self._opening._replace(openvino=False)
                self._start()
                return
            raise BadInput(
                f"model {self.manifest.name!r} cannot run: the worker process died at its start, perhaps for lack of memory. What it "
                "printed, if anything, is above; give fewer processes or more memory"
            ) from error
        except BaseException:
            self._workers.end()
            raise
        if fault is not None:
            self._workers.end()
            raise fault


class Window:
    """The texts of one `submit`, in batches that the processes compute."""

    def __init__(self, pool: OfflinePool, works: Sequence[TextWork]) -> None:
        self._pool, self._works = pool, works
        chunks = length_chunks([estimated_tokens(work) for work in works], pool.batch_tokens)
        self._batches = [(places, self._ask(places)) for places in chunks]

    def result(self) -> list[Result]:
        """The answers in the order of the texts, each JSON or the error of that text. A batch whose process dies is asked again.

        Raises:
            InternalError: processes died again and again with the same batch.
            StillroomError: no other process can be started.
        """
        results: dict[int, Result] = {}
        for places, batch in self._batches:
            results.update(zip(places, self._answers(places, batch), strict=True))
        return [results[place] for place in range(len(self._works))]

    def _answers(self, places: list[int], batch: Future[list[Result]]) -> list[Result]:
        name = self._pool.manifest.name
        for _ in range(MOST_DEATHS - 1):
            try:
                return batch.result()
            except ProcessDied:
                log.error("a worker process of model %r died; starting another", name)
                batch = self._ask(places)
        try:
            return batch.result()
        except ProcessDied as error:
            raise InternalError(
                f"worker processes of model {name!r} died {MOST_DEATHS} times with the same texts (count: {len(places):,}), perhaps for "
                "lack of memory; give fewer processes or more memory"
            ) from error

    def _ask(self, places: list[int]) -> Future[list[Result]]:
        return self._pool.ask([self._works[place] for place in places])


_opening: Opening  # of a worker process
_pipeline: "Pipeline | None" = None


def _begin(opening: Opening) -> None:
    global _opening  # noqa: PLW0603 - a pool has no other place for the state of a process
    _opening = opening
    settle_threads(opening.threads)
    os.dup2(sys.stderr.fileno(), 1)  # what a library prints must not go between the answers


def _model() -> "Pipeline":
    global _pipeline  # noqa: PLW0603
    if _pipeline is None:
        from serve.model.pipeline import open_pipeline

        bundle = open_bundle(_opening.bundle)
        if bundle.manifest.digest != _opening.digest:
            raise BundleError(
                f"the bundle {_opening.bundle} was changed while it was used: its digest is {bundle.manifest.digest[:12]}..., not "
                f"{_opening.digest[:12]}...; put the old one back, or begin again"
            )
        _, _, variant, threads, device, openvino = _opening
        _pipeline = open_pipeline(bundle, variant, threads, device, openvino=openvino)
    return _pipeline


def _fault() -> StillroomError | None:
    """Why the process cannot answer; None if it can."""
    try:
        _model()
    except StillroomError as error:
        return error
    return None


def _answers(works: list[TextWork]) -> list[Result]:
    encode = msgspec.json.Encoder().encode
    answers = dict(answer for done, _ in _model().answered(works) for answer in done)
    found = (answers[place] for place in range(len(works)))
    return [each if isinstance(each, StillroomError) else encode(each) for each in found]


def length_chunks(tokens: Sequence[int], chunk_tokens: int) -> list[list[int]]:
    """Indices of `tokens`, the longest first, in chunks of at most `chunk_tokens` tokens, or one text.

    The longest come first, so that the last chunks, which one process may compute while others are idle, are short texts.
    """
    chunks: list[list[int]] = []
    held = 0
    for place in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):
        if chunks and held + tokens[place] <= chunk_tokens:
            chunks[-1].append(place)
            held += tokens[place]
        else:
            chunks.append([place])
            held = tokens[place]
    return chunks
