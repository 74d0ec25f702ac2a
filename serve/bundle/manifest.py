"""A bundle on disk: what it must hold, and the proof that it holds exactly that.

The folder's `manifest.json` lists every other file with its size and SHA-256. Opening a bundle reads every byte of it
once and refuses the folder when a file is missing, changed, or not listed; when it is a link (but for those of the
Hub's cache, which lead to its blobs); and when it could be a pickle, which runs code when it is read. The model card is for
people, who may edit it: that is told and not refused.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from serve.errors import BadInput, BundleError

# 3: the digest leaves card and reports out. Of 1 and 2 it is of all files, and they are read too.
# 2: each variant names what it asks of a processor. Of 1 that is said for the whole bundle.
SCHEMA_VERSION = 3
WHOLE_DIGEST = 2  # the last version whose digest is of all files
MANIFEST = "manifest.json"
# The names that optimum and transformers.js look for.
ONNX_NAMES = {"fp32": "onnx/model.onnx", "fp16": "onnx/model_fp16.onnx", "int8": "onnx/model_quantized.onnx"}

MAX_MANIFEST_BYTES = 16 * 2**20
MAX_FILE_BYTES = 8 * 2**30
MAX_FILES = 1_000

# What bundles hold. Other kinds may be pickles under one of their many names, which run code when they are read.
SUFFIXES = frozenset({".json", ".onnx", ".safetensors", ".md", ".html", ".toml", ".txt"})
PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")

# What downloads from the Hub leave beside the files that were asked for; nothing reads it.
HUB_FILES = (".gitattributes", ".cache/huggingface/")
# What other programs leave in a folder: git in its first one (a file in a submodule or a worktree), the Finder of macOS in
# each. Nothing reads it either.
GIT = ".git"
FINDER_FILE = ".DS_Store"
CARD = "README.md"

# What these files say of a bundle changes nothing about it.
ABOUT_IT = frozenset({"README.md", "report.html", "report.json"})

Task = Literal["token-classification", "text-classification"]


class BundleFile(msgspec.Struct, frozen=True):
    """One listed file: its SHA-256 in lower-case hex, and its size."""

    sha256: str
    bytes: int


class Variant(msgspec.Struct, frozen=True):
    """One precision of the model: the graph's path in the bundle, how it was quantised, and what runs it."""

    file: str
    scheme: str
    runtime: str
    cpu: list[str] = []
    """A processor with any one of these gives the answers that were measured; none means that every one does."""
    temperature: float = 1.0
    """What logits are divided by before they become probabilities."""
    abstain_below: float | None = None
    """A text whose likeliest label has a probability below this is not answered; None answers every text."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `manifest.json` says. Unknown keys are left unread, so that older programs open additions."""

    schema_version: int
    name: str
    task: Task
    labels: list[str]
    """Index -> name; for token classification these are tags (`O`, `B-city`, ...)."""
    multi_label: bool = False
    """Whether any number of labels may apply to a text, each decided on its own. Bundles from before lack it."""
    relations: bool = False
    """Whether labels say what one part of a text is to another, both marked as `serve.text.entity_markers` does. As above."""
    pairs: bool = False
    """Whether it was trained on pairs of texts. As above."""
    max_length: int
    """Tokens, special ones included."""
    default_variant: str
    variants: dict[str, Variant]
    files: dict[str, BundleFile]
    """Every file of the bundle but the manifest itself, by its path with forward slashes."""
    inputs: list[str]
    """Names of the graph's inputs."""
    lineage: dict[str, object]
    metrics: dict[str, object]
    parity: dict[str, object]
    cpu: list[str]
    digest: str


@dataclass(frozen=True)
class Bundle:
    """An opened bundle, every byte of which was checked when it was opened."""

    path: Path
    manifest: Manifest
    card_edited: bool = False
    """Whether the model card is another than the manifest's."""

    def onnx_file(self, variant: str | None = None) -> Path:
        """The graph of `variant`, or of the default one. BadInput when the bundle has no such variant."""
        return self.path / self.variant(variant)[1].file

    def variant(self, name: str | None = None) -> tuple[str, Variant]:
        """The name and description of variant `name`, or of the default one. BadInput when there is none such."""
        chosen = name or self.manifest.default_variant
        if chosen not in self.manifest.variants:
            raise BadInput(
                f"variant {chosen!r} of {self.manifest.name!r}: the bundle has {_listed(self.manifest.variants)}; "
                "name one of these",
                field="variant",
            )
        found = self.manifest.variants[chosen]
        if self.manifest.schema_version == 1 and chosen == self.manifest.default_variant:
            found = msgspec.structs.replace(found, cpu=self.manifest.cpu)
        return chosen, found


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(obj: object) -> bytes:
    """`obj` as JSON in the one form that is hashed and written: keys sorted, two spaces, UTF-8, one newline at the end.

    ValueError for NaN, infinities and lone surrogates, which JSON cannot carry.
    """
    text = json.dumps(obj, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def digest(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest without its own `digest` key, card and reports: one name for what the bundle is.

    Reports hold timings, which differ each time: what is built from equal inputs has an equal digest all the same. That of an
    older schema version is of all files.
    """
    version = manifest.get("schema_version", SCHEMA_VERSION)
    left_out = frozenset() if isinstance(version, int) and version <= WHOLE_DIGEST else ABOUT_IT
    files = {name: manifest["files"][name] for name in manifest["files"] if name not in left_out}
    kept = {key: manifest[key] for key in manifest if key != "digest"} | {"files": files}
    return hashlib.sha256(canonical_json(kept)).hexdigest()


def open_bundle(path: Path | str) -> Bundle:
    """The bundle in folder `path`, every file checked. BundleError names what is wrong with it."""
    folder = Path(path)
    manifest = verify(folder)
    card = manifest.files.get(CARD)
    return Bundle(folder, manifest, card_edited=card is not None and sha256_file(folder / CARD) != card.sha256)


def verify(path: Path | str) -> Manifest:
    """Read and check a bundle: its manifest, its digest, and the size and SHA-256 of every file in the folder.

    All faults of the files are collected into one BundleError. Another content of the model card is none.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise BundleError(f"{folder} {what}; give a bundle, the folder that `stillroom run`, `demo` or `export` writes")
    manifest = _read_manifest(folder / MANIFEST)
    faults = list(_file_faults(folder, manifest.files))
    if faults:
        raise BundleError(
            f"the bundle {folder} is not what its manifest says: {'; '.join(faults)}. "
            "Copy the bundle again, or export it anew"
        )
    return manifest


def _read_manifest(path: Path) -> Manifest:
    if not path.is_file():
        raise BundleError(
            f"{path.parent} has no {MANIFEST}; give a bundle, the folder that `stillroom run`, `demo` or `export` writes"
        )
    if fault := _link_fault(path, path.parent):
        raise BundleError(f"{path.parent}: {MANIFEST} {fault}; copy the bundle with its files")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{path} has {path.stat().st_size:,} bytes; a manifest has at most {MAX_MANIFEST_BYTES:,}")
    content = path.read_bytes()
    try:
        raw = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is not JSON ({error}); export the bundle anew") from error
    if not isinstance(raw, dict):
        raise BundleError(f"{path} holds a JSON {type(raw).__name__}, not an object; export the bundle anew")
    # The version comes first: a newer manifest may well lack keys that this program asks for.
    version = raw.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema_version {version}, and this program reads up to {SCHEMA_VERSION}; upgrade stillroom"
        )
    if missing := [
        field.name for field in msgspec.structs.fields(Manifest) if field.required and field.name not in raw
    ]:
        raise BundleError(f"{path} lacks {_listed(missing)}; export the bundle anew")
    try:
        manifest = msgspec.convert(raw, Manifest)
        expected = digest(raw)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: {error}; export the bundle anew") from error
    if manifest.digest != expected:
        raise BundleError(
            f"{path} was changed: its digest says {manifest.digest[:12]}..., its content is {expected[:12]}...; "
            "copy the bundle again, or export it anew"
        )
    if content != canonical_json(raw):
        raise BundleError(f"{path} was changed: it is not written as manifests are; copy the bundle again")
    if faults := list(_manifest_faults(manifest)):
        raise BundleError(f"{path}: {'; '.join(faults)}; export the bundle anew")
    return manifest


def _manifest_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.schema_version < 1:
        yield f"schema_version is {manifest.schema_version}, the first one is 1"
    if not manifest.name:
        yield "name is empty"
    if not manifest.labels or len(set(manifest.labels)) != len(manifest.labels):
        yield "labels must be different names, at least one"
    for kind in ("multi_label", "relations", "pairs"):
        if getattr(manifest, kind) and manifest.task != "text-classification":
            yield f"{kind} is for text-classification, not for {manifest.task}"
    if manifest.max_length < 1:
        yield f"max_length is {manifest.max_length}, not a number of tokens"
    if manifest.default_variant not in manifest.variants:
        yield f"default_variant {manifest.default_variant!r} is not among the variants {_listed(manifest.variants)}"
    for name, variant in manifest.variants.items():
        yield from _variant_faults(name, variant, manifest.files)
    if "tokenizer.json" not in manifest.files:
        yield "'tokenizer.json' is not among the files"
    if len(manifest.files) > MAX_FILES:
        yield f"it lists {len(manifest.files):,} files, at most {MAX_FILES:,} are read"
    for name, file in manifest.files.items():
        yield from _listing_faults(name, file)


def _variant_faults(name: str, variant: Variant, files: dict[str, BundleFile]) -> Iterator[str]:
    if variant.file not in files:
        yield f"variant {name!r} is in {variant.file!r}, which is not among the files"
    if not 0 < variant.temperature < math.inf:
        yield f"variant {name!r} has the temperature {variant.temperature:g}, not a number above 0"
    if variant.abstain_below is not None and not 0 <= variant.abstain_below <= 1:
        yield f"variant {name!r} abstains below {variant.abstain_below:g}, not a probability from 0 to 1"


def _listing_faults(name: str, file: BundleFile) -> Iterator[str]:
    if not 0 <= file.bytes <= MAX_FILE_BYTES:
        yield f"{name!r} is said to have {file.bytes:,} bytes, at most {MAX_FILE_BYTES:,} are read"
    pure = PurePosixPath(name)
    if pure.suffix not in SUFFIXES:
        yield f"{name!r} is of no kind that bundles hold ({', '.join(sorted(SUFFIXES))}), and may be a pickle"
    if name == MANIFEST or pure.is_absolute() or ".." in pure.parts or "\\" in name or pure.as_posix() != name:
        yield f"file name {name!r} is not a plain path inside the bundle"


def _file_faults(folder: Path, listed: dict[str, BundleFile]) -> Iterator[str]:
    for name in sorted(listed):
        try:
            fault = _fault_of(folder / name, folder, None if name == CARD else listed[name])
        except OSError as error:  # unreadable, a name too long for the file system
            fault = f"cannot be read ({error.strerror})"
        if fault:
            yield f"{name} {fault}"
    for name in sorted(set(_names_in(folder)) - set(listed) - {MANIFEST}):
        pure = PurePosixPath(name)
        if not name.startswith(HUB_FILES) and pure.parts[0] != GIT and pure.name != FINDER_FILE:
            yield f"{name} is not in the manifest"


def _fault_of(file: Path, folder: Path, expected: BundleFile | None) -> str | None:
    """What is wrong with one listed file; its content may be any where none is `expected`."""
    fault = _link_fault(file, folder)
    if fault is None and not os.path.lexists(file):
        fault = "is missing"
    elif fault is None and not file.is_file():
        fault = "is no plain file"
    elif fault is None and expected and (size_bytes := file.stat().st_size) != expected.bytes:
        fault = f"has {size_bytes:,} bytes instead of {expected.bytes:,}"
    elif fault is None and expected and sha256_file(file) != expected.sha256:
        fault = "was changed (its SHA-256 is another)"
    elif fault is None and _starts_as_pickle(file):
        fault = "begins as a pickle does, which runs code when it is read"
    return fault


def _link_fault(file: Path, folder: Path) -> str | None:
    """What is wrong with `file` of the bundle `folder` as a link, or with a folder on the way to it."""
    blobs = _hub_blobs(folder)
    way = file
    while way != folder:
        # In the Hub's cache each file of a snapshot is a link to a blob, and only files are.
        target = Path(os.path.realpath(way))  # unlike resolve, it does not mind a link to itself
        if way.is_symlink() and not (way == file and blobs and target.parent == blobs):
            inside = target.is_relative_to(os.path.realpath(folder))
            return "is a link, and a bundle holds its files" if inside else "is a link that leaves the bundle"
        way = way.parent
    return None


def _hub_blobs(folder: Path) -> Path | None:
    """Where the files of `folder` really lie when it is a snapshot in the Hub's cache: `models--x--y/snapshots/REVISION`."""
    folder = folder.absolute()
    repository = folder.parent.parent
    blobs = repository / "blobs"
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--") or blobs.is_symlink():
        return None
    return Path(os.path.realpath(blobs))


def _starts_as_pickle(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4).startswith(PICKLE_STARTS)


def _names_in(folder: Path) -> Iterator[str]:
    """Paths of everything in `folder` but the folders that hold something: links to folders and empty ones are named."""
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        for name in [*files, *(name for name in folders if (here / name).is_symlink())]:
            yield (here / name).relative_to(folder).as_posix()
        if not folders and not files and here != folder:
            yield f"{here.relative_to(folder).as_posix()}/"


def _listed(names: object) -> str:
    """Names as a person lists them: `'fp32', 'int8'`."""
    return ", ".join(repr(str(name)) for name in names) if isinstance(names, list | dict) else repr(names)
