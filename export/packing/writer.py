"""Writes the bundle's folder in one step; the manifest names every file with its size and SHA-256."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import msgspec
from tokenizers import Tokenizer

from serve.bundle.manifest import (
    FINDER_FILE,
    MANIFEST,
    ONNX_NAMES,
    SCHEMA_VERSION,
    TaskName,
    ValidationScores,
    canonical_json,
    digest,
    sha256_file,
)
from serve.errors import BadInput
from serve.files import replacing_folder

POOLING_FILES = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
CHECKPOINT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")

# Keys that record how a tokenizer was opened or last called; they mean nothing elsewhere.
LEFTOVERS = frozenset(
    {"is_local", "local_files_only", "max_length", "stride", "truncation_strategy", "pad_to_multiple_of"}
    | {"name_or_path"}
)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def pack(
    out: Path,
    *,
    checkpoint: Path,
    onnx_files: Mapping[str, Path],
    schemes: Mapping[str, str],
    name: str,
    task: TaskName,
    labels: Sequence[str],
    vector_width: int = 0,
    normalised: bool = False,
    max_length: int,
    inputs: Sequence[str],
    default_variant: str,
    lineage: Mapping[str, object],
    metrics: Mapping[str, object],
    parity: Mapping[str, object],
    extra_files: Mapping[str, bytes],
    needs: Mapping[str, Sequence[str]] = MappingProxyType({}),
    runtimes: Mapping[str, str] = MappingProxyType({}),
    temperatures: Mapping[str, float] = MappingProxyType({}),
    abstains_below: Mapping[str, float | None] = MappingProxyType({}),
    promises: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    validation_scores: Mapping[str, ValidationScores] = MappingProxyType({}),
    with_checkpoint: bool = True,
    multi_label: bool = False,
    relations: bool = False,
    pairs: bool = False,
) -> Path:
    """Write the bundle `out` in one step, and return its path.

    Keys are variants (`fp32`, `fp16`, `int8`) in `onnx_files`, `schemes`, `needs` (processor features, any one of which
    suffices), `runtimes` (default onnxruntime), `temperatures` (default 1), `abstains_below` (probabilities; default None) and
    `promises` (the least score by the name of each promise) and
    `validation_scores`. Keys of `extra_files` are paths in the bundle (`README.md`,
    `report.html`, `report.json`, `recipe.toml`).
    `vector_width` and `normalised` describe the vectors of a model without labels.
    `multi_label`: any number of labels may apply to a text. `relations`: labels are about two marked parts of it. `pairs`:
    an input is a pair of texts. The folder is written beside `out`, synced to the disk and renamed, so a reader of `out`
    sees no bundle, the old one or the new one. Equal inputs give an equal digest, which does not cover the card and the
    reports. An older bundle at `out` is replaced. BadInput when `out` is anything else, or the checkpoint lacks a file.
    """
    refuse_foreign(out)
    _check(onnx_files, schemes, default_variant, extra_files)
    needed = (*CHECKPOINT_FILES, *(["model.safetensors"] if with_checkpoint else []))
    if missing := [file for file in needed if not (checkpoint / file).is_file()]:
        raise BadInput(
            f"{checkpoint} lacks {', '.join(missing)}; export needs the folder that `save_pretrained` wrote for the "
            "model and for its fast tokenizer, weights in one file"
        )
    with replacing_folder(out, synced=True) as folder:
        _write_checkpoint(folder, checkpoint, max_length, inputs, with_checkpoint=with_checkpoint)
        for variant, file in onnx_files.items():
            _file_at(folder, ONNX_NAMES[variant]).write_bytes(file.read_bytes())
        for path, content in extra_files.items():
            _file_at(folder, path).write_bytes(content)
        manifest: dict[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "name": name,
            "task": task,
            "labels": list(labels),
            **({"vector_width": vector_width, "normalised": normalised} if vector_width else {}),
            "multi_label": multi_label,
            "relations": relations,
            "pairs": pairs,
            "max_length": max_length,
            "default_variant": default_variant,
            "variants": {
                variant: {
                    "file": ONNX_NAMES[variant],
                    "scheme": schemes[variant],
                    "runtime": runtimes.get(variant, "onnxruntime"),
                    "cpu": list(needs.get(variant, ())),
                    "temperature": temperatures.get(variant, 1.0),
                    "abstain_below": abstains_below.get(variant),
                    **({"promises": dict(promises[variant])} if variant in promises else {}),
                    **(
                        {"validation_scores": msgspec.to_builtins(validation_scores[variant])}
                        if variant in validation_scores
                        else {}
                    ),
                }
                for variant in onnx_files
            },
            "files": _hashes(folder),
            "inputs": list(inputs),
            "lineage": dict(lineage),
            "metrics": dict(metrics),
            "parity": dict(parity),
            "cpu": list(needs.get(default_variant, ())),
        }
        (folder / MANIFEST).write_bytes(canonical_json({**manifest, "digest": digest(manifest)}))
    return out


def clear_leftovers(out: Path) -> None:
    """Remove the folders that killed calls of `pack` left beside `out`. Call it only while no other process packs `out`."""
    ours = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]+\.(partial|old)")
    for left in out.parent.iterdir():
        if ours.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)


def refuse_foreign(out: Path) -> None:
    """BadInput when `out` exists and is neither a bundle nor an empty folder, so that no other files are replaced.

    A bundle is a folder whose manifest has the right digest and which holds only the manifest's files and those that the
    macOS Finder adds. A bundle with damaged files counts, since replacing it repairs it.
    """
    if not os.path.lexists(out):
        return
    remedy = "name another folder, or remove this one"
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.is_symlink() or not out.is_dir():
        raise BadInput(f"{out} exists and is not a folder; a bundle is a folder: {remedy}")
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        files, own = set(manifest["files"]), manifest["digest"] == digest(manifest)
    except (OSError, ValueError, TypeError, KeyError):
        files, own = set(), False
    if not own:
        raise BadInput(f"{out} exists and is not a bundle; only a bundle is replaced: {remedy}")
    there = {path for path in _files_in(out) if PurePosixPath(path).name != FINDER_FILE}
    if strange := sorted(there - files - {MANIFEST}):
        raise BadInput(
            f"the bundle {out} also holds other files ({', '.join(strange[:5])}); move them away, or {remedy}"
        )


def _check(
    onnx_files: Mapping[str, Path], schemes: Mapping[str, str], default_variant: str, extra_files: Mapping[str, bytes]
) -> None:
    if unknown := sorted(set(onnx_files) - set(ONNX_NAMES)):
        raise BadInput(f"variants {', '.join(unknown)}: a bundle may hold only {', '.join(ONNX_NAMES)}")
    if default_variant not in onnx_files:
        raise BadInput(f"default variant {default_variant!r} is not in the bundle; give one of {', '.join(onnx_files)}")
    if unsaid := sorted(set(onnx_files) - set(schemes)):
        raise BadInput(f"no scheme is given for {', '.join(unsaid)}; give one for each variant, such as 'static'")
    taken = {MANIFEST, *CHECKPOINT_FILES, "special_tokens_map.json", "model.safetensors", *ONNX_NAMES.values()}
    for path in extra_files:
        pure = PurePosixPath(path)
        if path in taken or pure.is_absolute() or ".." in pure.parts or pure.as_posix() != path:
            raise BadInput(f"extra file {path!r}: give a plain relative path that is not one of the bundle's own files")


def _write_checkpoint(
    folder: Path, checkpoint: Path, max_length: int, inputs: Sequence[str], *, with_checkpoint: bool
) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # the folder that the weights came from: a private path
    (folder / "config.json").write_bytes(canonical_json(config))
    (folder / "tokenizer.json").write_text(plain_tokenizer(checkpoint / "tokenizer.json"), encoding="utf-8")
    tokenizer_config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_bytes(
        canonical_json(
            _portable(tokenizer_config) | {"model_max_length": max_length, "model_input_names": list(inputs)}
        )
    )
    special_tokens = checkpoint / "special_tokens_map.json"
    (folder / "special_tokens_map.json").write_bytes(
        special_tokens.read_bytes() if special_tokens.is_file() else special_tokens_map(tokenizer_config)
    )
    if with_checkpoint:
        shutil.copyfile(checkpoint / "model.safetensors", folder / "model.safetensors")
    for name in POOLING_FILES:  # with which sentence-transformers opens the folder
        if (checkpoint / name).is_file():
            _file_at(folder, name).write_bytes((checkpoint / name).read_bytes())


def _portable(tokenizer_config: Mapping[str, object]) -> dict[str, object]:
    """`tokenizer_config.json` without the keys in `LEFTOVERS`, and with a tokenizer class that every reader supports."""
    found = {key: value for key, value in tokenizer_config.items() if key not in LEFTOVERS}
    # transformers 5 writes this name for a fast tokenizer without its own class; transformers 4 and optimum know the older one.
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    return found


def plain_tokenizer(file: Path) -> str:
    """The tokenizer in `file` as JSON, without padding and truncation; a saved one may pad every text to one length."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    text: str = tokenizer.to_str(pretty=True)
    return text


def special_tokens_map(tokenizer_config: Mapping[str, object]) -> bytes:
    """`special_tokens_map.json` made from `tokenizer_config.json`, since transformers 5 no longer writes it."""
    named: dict[str, object] = {}
    for key in SPECIAL_TOKENS:
        token = tokenizer_config.get(key)
        if isinstance(token, dict):  # a token with its flags: the map needs only its text
            token = token.get("content")
        if isinstance(token, str):
            named[key] = token
    return canonical_json(named)


def _hashes(folder: Path) -> dict[str, dict[str, str | int]]:
    return {
        path: {"sha256": sha256_file(folder / path), "bytes": (folder / path).stat().st_size}
        for path in _files_in(folder)
    }


def _file_at(folder: Path, path: str) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
