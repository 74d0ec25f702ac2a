"""`_manifest.json` in the output of a bulk annotation: what it was begun with, its inputs, and the digest of each part that is there.

It is written again after parts are made, at most every few seconds. A part that is there without being listed was made just before the
work was killed: it appeared whole, from the same settings and inputs, so it is listed and not made again.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from serve.bundle.remote_files import shown
from serve.errors import BadInput
from stillroom.verbs.annotate.bulk.plan import Part, Scan, name_of, parts_of, row_ranges
from stillroom.verbs.annotate.bulk.storage import SHOWN_FILES, DiskFolder, InputPlace, Storage
from stillroom.verbs.annotate.reader import Start
from stillroom.verbs.annotate.writer import lineage_changes

MANIFEST = "_manifest.json"
SAVE_EVERY_S = 2.0


class PartsManifest:
    """The manifest of the output `storage`; `lineage` is what decides the answers.

    Raises:
        BadInput: the output holds other files, or parts of another job.
    """

    def __init__(self, storage: Storage, lineage: Mapping[str, Any], *, restart: bool = False) -> None:
        self.storage, self.lineage = storage, dict(lineage)
        self.inputs: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, dict[str, Any]] = {}
        self.sizes = storage.sizes()
        """The bytes of each file in the output at the start, by name."""
        self._saved_s = 0.0
        self.began = MANIFEST not in self.sizes
        if self.began:
            if strange := sorted(self.sizes)[:SHOWN_FILES]:
                raise BadInput(
                    f"--output {shown(storage.place)} holds files that `annotate` did not write ({', '.join(strange)}); give a folder "
                    "that is empty or not there"
                )
        elif restart:
            self._remove_all()
        else:
            found = self._found()
            if changed := lineage_changes(found["lineage"], self.lineage):
                raise BadInput(
                    f"--output {shown(storage.place)} was begun with {changed}. Give another --output, or --restart to begin anew"
                )
            self.inputs, self.parts = found["inputs"], found["parts"]

    def known(self, source: InputPlace) -> bool:
        """Whether `source` is listed as it is now."""
        return self.inputs.get(source.name) == _described(source, self.inputs.get(source.name, {}))

    def check_inputs(self, sources: Sequence[InputPlace]) -> None:
        """BadInput if an input of which there are parts has changed or is missing. Inputs may have been added."""
        now = {source.name: source for source in sources}
        changed = [
            f"{name} is missing" if name not in now else f"{name} has changed"
            for name in self.inputs
            if name not in now or not self.known(now[name])
        ]
        if changed:
            more = f" and {len(changed) - SHOWN_FILES:,} more" if len(changed) > SHOWN_FILES else ""
            raise BadInput(
                f"--output {shown(self.storage.place)} has parts of other inputs: {', '.join(changed[:SHOWN_FILES])}{more}. Give the same "
                "inputs (files may be added), another --output, or --restart to begin anew"
            )

    def add_input(self, found: Scan) -> None:
        """Lists an input."""
        starts = [list(start) for start in found.starts]
        self.inputs[found.source.name] = _described(found.source, {"rows": found.rows, "starts": starts})

    def parts_of(self, source: InputPlace) -> list[Part]:
        """The parts of a listed input."""
        listed = self.inputs[source.name]
        return parts_of(source, tuple(Start(*start) for start in listed["starts"]), listed["rows"])

    def is_there(self, part: Part, format: str | None) -> bool:
        """Whether a part was in the output at the start, with the bytes that are listed. One that is not listed is listed now."""
        name = name_of(part, format)
        if name not in self.sizes:
            self.parts.pop(name, None)
            return False
        if name not in self.parts:
            content = self.storage.read(name)
            if content is None:
                return False
            self.add_part(name, part.rows, len(content), hashlib.sha256(content).hexdigest())
        return bool(self.parts[name]["bytes"] == self.sizes[name])

    def add_part(self, name: str, rows: int, size_bytes: int, sha256: str) -> None:
        """Lists a part."""
        self.parts[name] = {"rows": rows, "bytes": size_bytes, "sha256": sha256}

    def missing(self) -> list[str]:
        """The listed parts that are not in the output as they are listed."""
        sizes = self.storage.sizes()
        return [name for name, part in self.parts.items() if sizes.get(name) != part["bytes"]]

    def save(self, *, complete: bool = False, now: bool = True) -> None:
        """Writes it; unless `now`, only if it was not written for a while. BadInput if another run has begun the output meanwhile."""
        if not now and time.monotonic() - self._saved_s < SAVE_EVERY_S:
            return
        # On a disk a lock keeps others away; a store has none.
        in_store = not isinstance(self.storage, DiskFolder) and self.storage.read(MANIFEST) is not None
        if in_store and (changed := lineage_changes(self._found()["lineage"], self.lineage)):
            raise BadInput(
                f"--output {shown(self.storage.place)} was begun by another run meanwhile, with {changed}. Give another --output, or wait "
                "for that run and give --restart"
            )
        self._write(complete=complete)

    def _write(self, *, complete: bool) -> None:
        document = {
            "complete": complete,
            "lineage": self.lineage,
            "inputs": self.inputs,
            "parts": dict(sorted(self.parts.items())),
        }
        with self.storage.writing(MANIFEST) as path:
            # ASCII: the name of a file need not be UTF-8.
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        self._saved_s = time.monotonic()

    def _found(self) -> dict[str, Any]:
        try:
            found = json.loads(self.storage.read(MANIFEST) or b"")
            if all(isinstance(found[key], dict) for key in ("lineage", "inputs", "parts")):
                return dict(found)
        except (ValueError, KeyError, TypeError):
            pass
        raise BadInput(
            f"{shown(self.storage.place)}/{MANIFEST} was not written by `annotate`, or is damaged; give another --output, or remove it"
        )

    def _remove_all(self) -> None:
        """Removes the parts that are listed, or would be made of the inputs that are; then lists nothing.

        The manifest is there at all times: without one, the output would be refused after a kill.
        """
        found = self._found()
        ours = set(found["parts"])
        for name, each in found["inputs"].items():
            begins = [start[0] for start in each["starts"]]
            ranges = {f"{name}-{begin:012d}-{end:012d}" for begin, end in row_ranges(begins, each["rows"])}
            ours |= {file for file in self.sizes if file.rpartition(".")[0] in ranges}
        for name in sorted(ours & set(self.sizes)):
            self.storage.remove(name)
        self.sizes = {}
        self._write(complete=False)


def _described(source: InputPlace, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "place": shown(source.place),
        "bytes": source.bytes,
        "mark": source.mark,
        "rows": about.get("rows"),
        "starts": about.get("starts"),
    }
