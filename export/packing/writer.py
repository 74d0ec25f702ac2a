"""Writes the bundle's folder in one step; the manifest names every file with its size and SHA-256."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec
from tokenizers import Tokenizer

from serve.bundle.manifest import FINDER_FILE, MANIFEST, ONNX_NAMES, Manifest, canonical_json, digest, sha256_file
from serve.errors import BadInput
from serve.files import replacing_folder, vacant

POOLING_FILES = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
CHECKPOINT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "model.safetensors"

# Keys that record how a tokenizer was opened or last called; they mean nothing elsewhere.
LEFTOVERS = frozenset(
    {"is_local", "local_files_only", "max_length", "stride", "truncation_strategy", "pad_to_multiple_of"}
    | {"name_or_path"}
)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def pack(
    out: Path,
    manifest: Manifest,
    checkpoint: Path,
    onnx_files: Mapping[str, Path],
    extra_files: Mapping[str, bytes],
) -> Path:
    """Write the bundle `out` in one step, and return its path.

    `manifest` is complete but for `files`, `cpu` and `digest`. Keys of `onnx_files` are its variants (`fp32`, `fp16`, `int8`), keys of
    `extra_files` paths in the bundle (`README.md`, `report.html`, `report.json`, `recipe.toml`).
    The folder is written beside `out`, synced to the disk and renamed, so a reader of `out`
    sees no bundle, the old one or the new one. Equal inputs give an equal digest, which does not cover the card and the
    reports. An older bundle at `out` is replaced. BadInput when `out` is anything else, or the checkpoint lacks a file.
    """
    refuse_foreign(out)
    _check(manifest, onnx_files, extra_files)
    if missing := [file for file in (*CHECKPOINT_FILES, WEIGHTS) if not (checkpoint / file).is_file()]:
        raise BadInput(
            f"{checkpoint} lacks {', '.join(missing)}; export needs the folder that `save_pretrained` wrote for the "
            "model and for its fast tokenizer, weights in one file"
        )
    with replacing_folder(out, synced=True, last=MANIFEST) as folder:
        _write_checkpoint(folder, checkpoint, manifest)
        for variant, file in onnx_files.items():
            _file_at(folder, ONNX_NAMES[variant]).write_bytes(file.read_bytes())
        for path, content in extra_files.items():
            _file_at(folder, path).write_bytes(content)
        described = msgspec.to_builtins(manifest, enc_hook=float)  # of numpy's numbers
        described["files"] = {
            path: {"sha256": sha256_file(folder / path), "bytes": (folder / path).stat().st_size}
            for path in _files_in(folder)
        }
        # What an older server reads: the needs of what is served unless another is asked for.
        described["cpu"] = manifest.variants[manifest.default_variant].cpu
        if not manifest.vector_width:
            del described["vector_width"], described["normalised"]
        for variant in described["variants"].values():
            for unset in [key for key in ("promises", "promise_confidence", "validation_scores") if not variant[key]]:
                del variant[unset]
        (folder / MANIFEST).write_bytes(canonical_json({**described, "digest": digest(described)}))
    return out


def clear_leftovers(out: Path) -> None:
    """Remove the folders that killed calls of `pack` left beside `out`. Call it only while no other process packs `out`."""
    ours = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]+\.(partial|old)")
    for left in out.parent.iterdir():
        if ours.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)


def refuse_foreign(out: Path) -> None:
    """BadInput when `out` exists and is neither a bundle nor vacant, so that no other files are replaced; see `serve.files.vacant`.

    A bundle is a folder whose manifest has the right digest and which holds only the manifest's files and those that the
    macOS Finder adds. A bundle with damaged files counts, since replacing it repairs it.
    """
    if vacant(out, MANIFEST):
        return
    remedy = "name another folder, or remove this one"
    if not out.is_dir():
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


def _check(manifest: Manifest, onnx_files: Mapping[str, Path], extra_files: Mapping[str, bytes]) -> None:
    if unknown := sorted(set(onnx_files) - set(ONNX_NAMES)):
        raise BadInput(f"variants {', '.join(unknown)}: a bundle may hold only {', '.join(ONNX_NAMES)}")
    if manifest.default_variant not in onnx_files:
        raise BadInput(
            f"default variant {manifest.default_variant!r} is not in the bundle; give one of {', '.join(onnx_files)}"
        )
    if unsaid := sorted(set(onnx_files) ^ set(manifest.variants)):
        raise BadInput(f"the manifest and the graphs differ in {', '.join(unsaid)}; give a graph for each variant")
    taken = {MANIFEST, *CHECKPOINT_FILES, WEIGHTS, "special_tokens_map.json", *ONNX_NAMES.values()}
    for path in extra_files:
        pure = PurePosixPath(path)
        if path in taken or pure.is_absolute() or ".." in pure.parts or pure.as_posix() != path:
            raise BadInput(f"extra file {path!r}: give a plain relative path that is not one of the bundle's own files")


def _write_checkpoint(folder: Path, checkpoint: Path, manifest: Manifest) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # the folder that the weights came from: a private path
    (folder / "config.json").write_bytes(canonical_json(config))
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.no_padding()  # a saved one may pad every text to one length
    tokenizer.no_truncation()
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    tokenizer_config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    portable = {key: value for key, value in tokenizer_config.items() if key not in LEFTOVERS}
    portable |= {"model_max_length": manifest.max_length, "model_input_names": manifest.inputs}
    # transformers 5 writes this name for a fast tokenizer without its own class; transformers 4 and optimum know the older one.
    if portable.get("tokenizer_class") == "TokenizersBackend":
        portable["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_bytes(canonical_json(portable))
    special_tokens = checkpoint / "special_tokens_map.json"
    (folder / "special_tokens_map.json").write_bytes(
        special_tokens.read_bytes() if special_tokens.is_file() else special_tokens_map(tokenizer_config)
    )
    shutil.copyfile(checkpoint / WEIGHTS, folder / WEIGHTS)
    for name in POOLING_FILES:  # with which sentence-transformers opens the folder
        if (checkpoint / name).is_file():
            _file_at(folder, name).write_bytes((checkpoint / name).read_bytes())


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


def _file_at(folder: Path, path: str) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
