"""A bundle on disk: its manifest, and the check that the folder holds exactly what the manifest lists.

`manifest.json` lists every other file with its size and SHA-256. Opening a bundle reads every byte once. It refuses a file that
is missing, changed or not listed, a link (other than those of the Hub's cache to its blobs), a graph that takes weights from other
files, and a file that could be a pickle, since reading a pickle runs code. An edited model card is reported and accepted.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from serve.bundle.external_data import graph_fault
from serve.errors import BadInput, BundleError
from serve.files import LOST_AND_FOUND
from serve.observe.logs import plain

# Those that a bundle may have; `serve.tasks` says what each is.
TaskName = Literal[
    "token-classification", "text-classification", "text-regression", "question-answering", "feature-extraction"
]

SecondText = Literal["needed", "refused", "either"]

# 3: the digest leaves out model card and reports. In 1 and 2 it covers all files. All three versions can be read.
# 2: each variant names the instruction sets that it needs. In 1 the bundle names them once.
SCHEMA_VERSION = 3
WHOLE_DIGEST = 2  # the last version whose digest covers all files
MANIFEST = "manifest.json"
# The names that optimum and transformers.js expect.
ONNX_NAMES = {"fp32": "onnx/model.onnx", "fp16": "onnx/model_fp16.onnx", "int8": "onnx/model_quantized.onnx"}

MAX_MANIFEST_BYTES = 16 * 2**20
MAX_FILE_BYTES = 8 * 2**30
MAX_FILES = 1_000
MAX_NAME_BYTES = 255  # of a listed path; file systems take at most that in one of its parts

# Kinds of files that bundles hold. Others may be pickles, which have many suffixes and run code when they are read.
SUFFIXES = frozenset({".json", ".onnx", ".safetensors", ".md", ".html", ".toml", ".txt"})
GRAPH_SUFFIX = ".onnx"
PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")

# Files that downloads from the Hub leave in the folder. Nothing reads them.
HUB_FILES = (".gitattributes", ".cache/huggingface/")
# Files that other programs leave: git at the top (a file in a submodule or a worktree, otherwise a folder), the Finder of macOS
# in every folder. Nothing reads them.
GIT = ".git"
FINDER_FILE = ".DS_Store"
CARD = "README.md"

# These files describe the bundle; the digest leaves them out.
ABOUT_IT = frozenset({"README.md", "report.html", "report.json"})


class BundleFile(msgspec.Struct, frozen=True):
    """One listed file: its SHA-256 in lower-case hex, and its size."""

    sha256: str
    bytes: int


class ValidationScores(msgspec.Struct, frozen=True):
    """How sure a variant is of its answers to `texts` texts of validation (`serve.text.answers.confidence`): mean and standard deviation.

    And how many tokens they have; a mean of 0 stands for bundles of versions that did not say.
    """

    texts: int
    mean: float
    deviation: float
    tokens_mean: float = 0.0
    tokens_deviation: float = 0.0


class Variant(msgspec.Struct, frozen=True):
    """One precision of the model: the path of its graph in the bundle, how it was quantised, and its runtime."""

    file: str
    scheme: str
    runtime: str
    cpu: list[str] = []
    """Instruction sets: a processor with any one of them gives the measured answers. If empty, every processor does."""
    temperature: float = 1.0
    """Logits are divided by it before they become probabilities."""
    abstain_below: float | None = None
    """With `abstain`, a text whose likeliest label has a probability below this gets no label. None: no threshold is known.

    For question answering, the score below which a question has no answer, asked or not.
    """
    promises: dict[str, float] = {}
    """By the name of a promise, such as `precision=0.95`: the least score of the answers for which it was made."""
    promise_confidence: str = ""
    """What the promises hold with: `a confidence of 0.95`, or why there is none. Empty without promises, and in older bundles."""
    validation_scores: ValidationScores | None = None
    """What its confidence is compared with; None without labelled validation texts, and for numbers and vectors."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `manifest.json`. Unknown keys are ignored, so that a version of this program can read later additions."""

    schema_version: int
    name: str
    task: TaskName
    labels: list[str]
    """Names in the order of the logits; for token classification these are tags (`O`, `B-city`, ...), for regression `score` alone, for
    question answering `start` and `end`, for vectors none."""
    vector_width: int = 0
    """How many numbers the vector of a text has; 0 for every task but feature extraction. Older bundles lack this key and the next."""
    normalised: bool = False
    """Whether vectors have length 1."""
    multi_label: bool = False
    """Whether any number of labels may apply to a text, each decided on its own. Older bundles lack this key and the next two."""
    relations: bool = False
    """Whether labels name the relation of one part of a text to another. `serve.text.entity_markers` puts markers around both."""
    pairs: bool = False
    """Whether the model was trained on pairs of texts."""
    single_texts: bool | None = None
    """Whether it was trained on texts without a second one; None if unknown, as in older bundles."""
    max_length: int
    """Tokens, special ones included."""
    default_variant: str
    variants: dict[str, Variant]
    files: dict[str, BundleFile]
    """Every file of the bundle except the manifest, by its path with forward slashes."""
    inputs: list[str]
    """Names of the graph's inputs."""
    lineage: dict[str, object]
    metrics: dict[str, object]
    parity: dict[str, object]
    cpu: list[str]
    digest: str

    @property
    def outputs(self) -> int:
        """How many numbers the graph gives a text, or a token: logits of the labels, or the vector."""
        return self.vector_width or len(self.labels)

    @property
    def second_text(self) -> SecondText:
        """Whether a text needs a second one; "either" where it is not known that the model was trained on one kind alone."""
        if self.single_texts is None or (self.pairs and self.single_texts):
            return "either"
        return "needed" if self.pairs else "refused"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Every byte was checked when it was opened."""

    path: Path
    manifest: Manifest
    card_edited: bool = False
    """Whether the model card differs from the one in the manifest."""

    def onnx_file(self, variant: str | None = None) -> Path:
        """The graph of `variant`, or of the default one. BadInput when the bundle has no such variant."""
        return self.path / self.variant(variant)[1].file

    def variant(self, name: str | None = None) -> tuple[str, Variant]:
        """The name and description of variant `name`, or of the default one. BadInput when the bundle has no such variant."""
        chosen = name or self.manifest.default_variant
        if chosen not in self.manifest.variants:
            raise BadInput(
                f"{self.manifest.name!r} has no variant {chosen!r}; give one of {_listed(self.manifest.variants)}",
                field="variant",
            )
        variant = self.manifest.variants[chosen]
        if self.manifest.schema_version == 1 and chosen == self.manifest.default_variant:
            variant = msgspec.structs.replace(variant, cpu=self.manifest.cpu)
        return chosen, variant


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(obj: object) -> bytes:
    """`obj` as JSON in the one form that is hashed and written: keys sorted, two spaces, UTF-8, one newline at the end.

    ValueError for NaN, infinities and lone surrogates, which JSON does not have.
    """
    text = json.dumps(obj, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def digest(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest without its `digest` key, model card and reports. It identifies the bundle.

    Reports hold timings, which differ each time; without them, bundles built from equal inputs have equal digests. In older
    schema versions the digest covers all files.
    """
    version = manifest.get("schema_version", SCHEMA_VERSION)
    left_out = frozenset() if isinstance(version, int) and version <= WHOLE_DIGEST else ABOUT_IT
    files = {name: manifest["files"][name] for name in manifest["files"] if name not in left_out}
    kept = {key: manifest[key] for key in manifest if key != "digest"} | {"files": files}
    return hashlib.sha256(canonical_json(kept)).hexdigest()


def read_bundle(folder: Path) -> Bundle:
    """As `serve.tasks.open_bundle` of a folder, but the rules of its task are not checked."""
    manifest = verify(folder)
    card = manifest.files.get(CARD)
    return Bundle(folder, manifest, card_edited=card is not None and sha256_file(folder / CARD) != card.sha256)


def verify(path: Path | str) -> Manifest:
    """Reads and checks a bundle: its manifest, its digest, and the size and SHA-256 of every file in the folder.

    One BundleError lists all faults of the files. An edited model card is no fault.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise BundleError(f"{folder} {what}; give a bundle, the folder that `stillroom run`, `demo` or `export` writes")
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"{folder} has no {MANIFEST}; give a bundle, the folder that `stillroom run`, `demo` or `export` writes"
        )
    if fault := _link_fault(path, folder):
        raise BundleError(f"{folder}: {MANIFEST} {fault}; copy the bundle with its files")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{path} has {path.stat().st_size:,} bytes; a manifest may have {MAX_MANIFEST_BYTES:,} bytes")
    manifest = parse_manifest(path.read_bytes(), path)
    if faults := list(_file_faults(folder, manifest.files)):
        raise BundleError(
            f"the bundle {folder} differs from its manifest: {'; '.join(faults)}. Copy the bundle again, or export it again"
        )
    return manifest


def parse_manifest(content: bytes, path: Path | str) -> Manifest:
    """The checked manifest in `content`; `path` names it in messages. BundleError says what is wrong with it."""
    try:
        raw = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is not JSON ({error}); export the bundle again") from error
    if not isinstance(raw, dict):
        raise BundleError(f"{path} holds JSON that is not an object; export the bundle again")
    # The version is checked first: a newer manifest may lack keys that this program needs.
    version = raw.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema_version {version}, and this program reads up to {SCHEMA_VERSION}; upgrade stillroom"
        )
    if missing := [
        field.name for field in msgspec.structs.fields(Manifest) if field.required and field.name not in raw
    ]:
        raise BundleError(f"{path} lacks {_listed(missing)}; export the bundle again")
    try:
        manifest = msgspec.convert(raw, Manifest)
        expected = digest(raw)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: {error}; export the bundle again") from error
    if manifest.digest != expected:
        raise BundleError(
            f"{path} was changed: its digest is {manifest.digest[:12]}..., that of its content {expected[:12]}...; "
            "copy the bundle again, or export it again"
        )
    if content != canonical_json(raw):
        raise BundleError(f"{path} was changed: its JSON is not formatted as it was written; copy the bundle again")
    if faults := list(_manifest_faults(manifest)):
        raise BundleError(f"{path}: {'; '.join(faults)}; export the bundle again")
    return manifest


def _manifest_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.schema_version < 1:
        yield f"schema_version is {manifest.schema_version}, and the first version is 1"
    if not manifest.name:
        yield "name is empty"
    if manifest.max_length < 1:
        yield f"max_length is {manifest.max_length}, not at least 1 token"
    if manifest.default_variant not in manifest.variants:
        yield f"default_variant {manifest.default_variant!r} is not among the variants {_listed(manifest.variants)}"
    for name, variant in manifest.variants.items():
        yield from _variant_faults(name, variant, manifest.files)
    if "tokenizer.json" not in manifest.files:
        yield "'tokenizer.json' is not among the files"
    if len(manifest.files) > MAX_FILES:
        yield f"it lists {len(manifest.files):,} files, more than {MAX_FILES:,}"
    for name, file in manifest.files.items():
        if not 0 <= file.bytes <= MAX_FILE_BYTES:
            yield f"{name!r} has {file.bytes:,} bytes in the list, not 0 to {MAX_FILE_BYTES:,}"
        pure = PurePosixPath(name)
        if pure.suffix not in SUFFIXES:
            yield f"{name!r} may be a pickle; files of bundles end in one of {', '.join(sorted(SUFFIXES))}"
        inside = not pure.is_absolute() and ".." not in pure.parts and "\\" not in name and pure.as_posix() == name
        if name == MANIFEST or not inside or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
            yield f"file name {name!r} is not a plain path inside the bundle"


def kinds_of(flagged: Any) -> list[str]:
    """Which of the flags of classification are set in a manifest, or in what has the same flags."""
    return [kind for kind in ("multi_label", "relations", "pairs") if getattr(flagged, kind)]


def label_faults(labels: Sequence[str]) -> Iterator[str]:
    """Why no bundle can have these `labels` of logits; nothing if one can."""
    if not labels:
        yield "labels are missing"
    if twice := sorted(label for label, count in Counter(labels).items() if count > 1):
        yield f"the label {twice[0]!r} stands for several numbers of the model"


def _variant_faults(name: str, variant: Variant, files: dict[str, BundleFile]) -> Iterator[str]:
    if variant.file not in files:
        yield f"the file {variant.file!r} of variant {name!r} is not among the files"
    elif not variant.file.endswith(GRAPH_SUFFIX):  # only such files are checked as graphs
        yield f"the file {variant.file!r} of variant {name!r} does not end in {GRAPH_SUFFIX}"
    if not 0 < variant.temperature < math.inf:
        yield f"variant {name!r} has the temperature {variant.temperature:g}, not a number above 0"
    if variant.abstain_below is not None and not 0 <= variant.abstain_below <= 1:
        yield f"variant {name!r} abstains below {variant.abstain_below:g}, not a probability from 0 to 1"
    scores = variant.validation_scores
    if scores and not (
        scores.texts > 0
        and 0 <= scores.mean <= 1
        and 0 <= scores.deviation <= 1
        and 0 <= scores.tokens_mean < math.inf
        and 0 <= scores.tokens_deviation < math.inf
    ):
        yield f"variant {name!r} has validation_scores that no texts have: {scores.mean:g} and {scores.deviation:g} of {scores.texts}"
    for promise, least in variant.promises.items():
        if not 0 <= least <= 1:
            yield f"variant {name!r} keeps {promise!r} from a score of {least:g}, not a probability from 0 to 1"


def _file_faults(folder: Path, listed: dict[str, BundleFile]) -> Iterator[str]:
    for name in sorted(listed):
        try:
            fault = _fault_of(folder / name, folder, None if name == CARD else listed[name])
        except OSError as error:  # such as no permission, or a name that is too long for the file system
            fault = f"cannot be read ({error.strerror})"
        if fault:
            yield f"{name} {fault}"
    for name in sorted(set(_names_in(folder)) - set(listed) - {MANIFEST}):
        pure = PurePosixPath(name)
        if not name.startswith(HUB_FILES) and pure.parts[0] != GIT and pure.name not in (FINDER_FILE, LOST_AND_FOUND):
            yield f"{plain(name)} is not in the manifest"


def _fault_of(file: Path, folder: Path, expected: BundleFile | None) -> str | None:
    """What is wrong with one listed file. If `expected` is None, its content is not checked."""
    fault = _link_fault(file, folder)
    if fault is None and not os.path.lexists(file):
        fault = "is missing"
    elif fault is None and not file.is_file():
        fault = "is not a regular file"
    elif fault is None and expected and (size_bytes := file.stat().st_size) != expected.bytes:
        fault = f"has {size_bytes:,} bytes instead of {expected.bytes:,}"
    elif fault is None and expected and sha256_file(file) != expected.sha256:
        fault = "was changed (its SHA-256 differs)"
    elif fault is None:
        with file.open("rb") as opened:
            if opened.read(4).startswith(PICKLE_STARTS):
                return "starts like a pickle, and reading a pickle runs code"
        fault = graph_fault(file) if file.suffix == GRAPH_SUFFIX else None
    return fault


def _link_fault(file: Path, folder: Path) -> str | None:
    """What is wrong with `file` of the bundle `folder`, or a folder between the two, as a link; None if neither is a link."""
    # A snapshot in the Hub's cache is `models--x--y/snapshots/REVISION`, and its blobs are in `models--x--y/blobs`.
    repository = folder.absolute().parent.parent
    blobs = Path(os.path.realpath(repository / "blobs"))
    on_hub = folder.absolute().parent.name == "snapshots" and repository.name.startswith("models--")
    on_hub = on_hub and not (repository / "blobs").is_symlink()
    way = file
    while way != folder:
        # In the Hub's cache each file of a snapshot is a link to a blob. Folders are not links.
        target = Path(os.path.realpath(way))  # unlike Path.resolve, it does not raise for a link to itself
        if way.is_symlink() and not (way == file and on_hub and target.parent == blobs):
            inside = target.is_relative_to(os.path.realpath(folder))
            return "is a link, and not a file of its own" if inside else "is a link out of the bundle"
        way = way.parent
    return None


def _names_in(folder: Path) -> Iterator[str]:
    """Paths of the files in `folder`, of links to folders, and of empty folders."""
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        for name in [*files, *(name for name in folders if (here / name).is_symlink())]:
            yield (here / name).relative_to(folder).as_posix()
        if not folders and not files and here != folder:
            yield f"{here.relative_to(folder).as_posix()}/"


def _listed(names: object) -> str:
    """Names in a message: `'fp32', 'int8'`."""
    return ", ".join(repr(str(name)) for name in names) if isinstance(names, list | dict) else repr(names)
