"""Checks that all processes of a training have the same code, models, data and settings, before any of them trains."""

import dataclasses
import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compress
from compress import distributed
from compress.peers import Place
from compress.runs.stages import folder_fingerprint, texts_fingerprint
from compress.runs.task_inputs import TaskInputs
from serve.bundle.manifest import canonical_json, sha256_file

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
# Settings that may differ: paths, whose contents are compared, and what each process decides for its machine.
MAY_DIFFER = (
    "teacher", "model", "start", "data", "corpus", "unlabelled", "teacher_labels", "keep_words_of", "promise_data", "teacher_cache", "out",
    "threads", "trackers",
)  # fmt: skip
MUST_ALL_BE_GIVEN = ("teacher_cache", "keep_words_of")
SHOWN = 60  # most characters of a value that a message names


def check_same_inputs(settings: Any, contents: Mapping[str, object]) -> None:
    """Check that each process has the code, `settings` (a dataclass) and `contents` of the main one.

    Args:
        settings: those of the command, resolved for this machine.
        contents: by the flag that names them, what was read: fingerprints, or anything that JSON can hold.

    Raises:
        BadInput: a process differs; the message names its node and every difference.
    """
    if distributed.count() == 1:
        return
    own = _code() | {name: hashlib.sha256(canonical_json(value)).hexdigest() for name, value in contents.items()}
    own |= {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in dataclasses.asdict(settings).items()
        if name not in MAY_DIFFER
    }
    # Where they are may differ, and not whether: with a cache, processes do other work together.
    own |= {
        f"--{name.replace('_', '-')}": "given" if getattr(settings, name, "") else "not given"
        for name in MUST_ALL_BE_GIVEN
    }

    def refusal(place: Place, theirs: Mapping[str, str]) -> str:
        names = [name for name in own | dict(theirs) if own.get(name) != theirs.get(name)]
        apart = [_apart(name, own.get(name, "none"), theirs.get(name, "none"), contents) for name in names]
        if not apart:
            return ""
        return (
            f"{str(place).capitalize()}, differs from the main process: {'; '.join(apart)}. All nodes need the same code, the same files "
            "at the paths that are given, and the same settings. Make them the same and start again; nothing was trained."
        )

    distributed.agreed(own, refusal)


def contents_of(inputs: TaskInputs) -> dict[str, object]:
    """What was read for training on a task, by the flag that names it."""
    asked = inputs.answering
    return {
        inputs.opened.role: inputs.teacher_fingerprint,
        **({asked.role: folder_fingerprint(asked.folder)} if asked else {}),
        **({} if inputs.opened.role == "--start" else {"--start": inputs.start_fingerprint or inputs.settings.start}),
        "--data": [inputs.data_fingerprint, inputs.labels],
        "--teacher-labels": inputs.answers.fingerprint if inputs.answers else "",
        "--unlabelled": texts_fingerprint(inputs.unlabelled),
        "--corpus": texts_fingerprint(inputs.corpus),
    }


def _apart(name: str, ours: str, theirs: str, contents: Mapping[str, object]) -> str:
    """One difference in words."""
    if name in contents:
        return f"the contents of {name}"
    if name == "stillroom":
        return "the code of stillroom"
    return f"{name} is {theirs[:SHOWN]} there and {ours[:SHOWN]} in the main process"


def _code() -> dict[str, str]:
    """The versions of what computes, and the SHA-256 of this program's own."""
    folder = Path(compress.__file__).parent
    files = [file for package in ("compress", "serve", "stillroom") for file in (folder.parent / package).rglob("*.py")]
    ours = sorted((str(file.relative_to(folder.parent)), sha256_file(file)) for file in files)
    found = {"stillroom": hashlib.sha256(canonical_json(ours)).hexdigest(), "Python": platform.python_version()}
    return found | {name: version(name) for name in LIBRARIES}
