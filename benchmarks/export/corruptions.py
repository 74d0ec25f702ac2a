"""Count how many random corruptions of a bundle are detected when it is opened.

    python benchmarks/export/corruptions.py BUNDLE [--count 1000] [--seed 0]

A copy of the bundle is corrupted in one random way after another, each undone before the next: bits flipped, files cut,
grown, removed, added, renamed, swapped or turned into links, the manifest's values changed with and without a new
digest, paths that leave the folder.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from serve.bundle.manifest import canonical_json, digest
from serve.errors import BundleError
from serve.tasks import open_bundle

Undo = Callable[[], None]
PATHS = ("../outside", "/etc/hostname", "onnx/../../outside", "a\\b", "onnx//model.onnx", "./config.json", "x.pkl", "")


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(folder: Path, chance: random.Random) -> tuple[str, Undo]:
    file = chance.choice([file for file in files_of(folder) if file.stat().st_size])
    at, bit = chance.randrange(file.stat().st_size), 1 << chance.randrange(8)

    def turn() -> None:
        with file.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ bit]))

    turn()
    return f"{file.name}: bit {bit} of byte {at}", turn


def cut_or_grow(folder: Path, chance: random.Random) -> tuple[str, Undo]:
    file = chance.choice([file for file in files_of(folder) if file.stat().st_size])
    size = file.stat().st_size
    keep = chance.randrange(size)
    if chance.random() < 0.5:
        with file.open("rb") as opened:
            opened.seek(keep)
            rest = opened.read()
        os.truncate(file, keep)

        def undo() -> None:
            with file.open("ab") as opened:
                opened.write(rest)

        return f"{file.name} cut to {keep} bytes", undo
    with file.open("ab") as opened:
        opened.write(chance.randbytes(chance.randint(1, 64)))
    return f"{file.name} grown", lambda: os.truncate(file, size)


def remove(folder: Path, chance: random.Random) -> tuple[str, Undo]:
    file = chance.choice(files_of(folder))
    aside = folder.parent / "aside"
    file.rename(aside)
    return f"{file.name} removed", lambda: void(aside.rename(file))


def add(folder: Path, chance: random.Random) -> tuple[str, Undo]:
    parent = chance.choice([folder, *(path for path in folder.rglob("*") if path.is_dir())])
    added = parent / chance.choice(["notes.txt", ".hidden", "model.pkl", "model.onnx.data", "more"])
    if added.name == "more":
        added.mkdir()
        return f"folder {added.name} added", added.rmdir
    added.write_bytes(chance.randbytes(chance.randint(0, 64)))
    return f"{added.name} added", added.unlink


def rename(folder: Path, chance: random.Random) -> tuple[str, Undo]:
    file = chance.choice(files_of(folder))
    other = file.with_name(chance.choice([file.name + "~", file.name.upper(), f"x{file.name}"]))
    file.rename(other)
    return f"{file.name} renamed to {other.name}", lambda: void(other.rename(file))


def swap(folder: Path, chance: random.Random) -> tuple[str, Undo]:
    one, other = chance.sample(files_of(folder), 2)
    aside = folder.parent / "aside"

    def exchange() -> None:
        one.rename(aside)
        other.rename(one)
        aside.rename(other)

    exchange()
    return f"{one.name} and {other.name} swapped", exchange


def link(folder: Path, chance: random.Random) -> tuple[str, Undo]:
    file = chance.choice(files_of(folder))
    target = chance.choice([folder.parent / "outside", file.with_name(f"real-{file.name}")])
    file.rename(target)
    file.symlink_to(target)

    def undo() -> None:
        file.unlink()
        target.rename(file)

    return f"{file.name} a link to {target.name}", undo


def manifest(folder: Path, chance: random.Random) -> tuple[str, Undo]:
    """Values of the manifest changed, without a new digest; or a path that is not allowed, with a new digest."""
    file = folder / "manifest.json"
    before = file.read_bytes()
    document: dict[str, Any] = json.loads(before)
    if chance.random() < 0.5:
        key = chance.choice(sorted(document))
        values: list[Any] = [None, 0, "", [], {}, "x", -1, 2**70]
        document[key] = chance.choice([value for value in values if value != document[key]])
        what = f"manifest: {key} changed"
    else:
        name = chance.choice(sorted(document["files"]))
        path = chance.choice(PATHS)
        document["files"][path] = document["files"].pop(name)
        for variant in document["variants"].values():
            variant["file"] = path if variant["file"] == name else variant["file"]
        document["digest"] = digest(document)
        what = f"manifest: {name} is at {path!r}, with a new digest"
    file.write_bytes(canonical_json(document))
    return what, lambda: void(file.write_bytes(before))


KINDS = (flip, flip, cut_or_grow, cut_or_grow, remove, add, rename, swap, link, manifest, manifest)


def void(_: object) -> None:
    """Drops the value of a call, for an undo."""


def corrupted(folder: Path, count: int, seed: int) -> Iterator[str]:
    """Corrupts `folder` in `count` ways, one at a time: yields a description of each, and undoes it before the next."""
    chance = random.Random(seed)
    for _ in range(count):
        what, undo = chance.choice(KINDS)(folder, chance)
        try:
            yield what
        finally:
            undo()


def unnoticed(bundle: Path, count: int, seed: int) -> tuple[list[str], Counter[str]]:
    """The corruptions of a copy of `bundle` that `open_bundle` did not detect, and the outcomes of all."""
    passed: list[str] = []
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(bundle, Path(scratch) / "bundle"))
        for what in corrupted(folder, count, seed):
            try:
                open_bundle(folder)
                passed.append(what)
                outcomes["passed"] += 1
            except BundleError:
                outcomes["named"] += 1
            except Exception as error:  # a crash detects the corruption, but is a bug
                passed.append(f"{what}: {type(error).__name__}: {error}")
                outcomes["crashed"] += 1
        open_bundle(folder)  # all corruptions are undone: none above was refused because of an earlier one
    return passed, outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    passed, outcomes = unnoticed(given.bundle, given.count, given.seed)
    print(f"{given.count} corruptions: {outcomes['named']} refused with a message, {len(passed)} not")
    for what in passed:
        print(f"  {what}")


if __name__ == "__main__":
    main()
