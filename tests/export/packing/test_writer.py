import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from small_checkpoints import MAX_LENGTH, Exported
from tokenizers import Tokenizer

import serve.files
from export.packing.writer import pack, special_tokens_map
from serve.bundle.manifest import ONNX_NAMES, SCHEMA_VERSION, Manifest, Variant
from serve.errors import BadInput, BundleError
from serve.tasks import open_bundle
from serve.text.tokenizer import load_tokenizer

Packer = Callable[..., Path]
SCHEMES = {"fp32": "fp32", "int8": "static-qdq"}


@pytest.fixture
def packed(bert: Exported, bert_int8: Path) -> Packer:
    """`packed(out, **changes)`: the small BERT as a bundle at `out`; changes of the manifest, of a variant's part of it, or of files."""

    def pack_bert(out: Path, **changes: object) -> Path:
        variants = {name: Variant(ONNX_NAMES[name], scheme, "onnxruntime") for name, scheme in SCHEMES.items()}
        variants |= {name: replace(variants[name], **changes.pop(name)) for name in SCHEMES if name in changes}  # type: ignore[arg-type]
        files: dict[str, Any] = {
            "checkpoint": bert.checkpoint,
            "onnx_files": {"fp32": bert.onnx_file, "int8": bert_int8},
            "extra_files": {"README.md": b"# places\n", "report.json": b"{}\n"},
        }
        files |= {key: changes.pop(key) for key in files if key in changes}
        manifest: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION, "name": "places", "task": "token-classification", "labels": list(bert.info.labels),
            "max_length": MAX_LENGTH, "default_variant": "int8", "variants": variants, "files": {}, "inputs": list(bert.info.inputs),
            "lineage": {"teacher": "a larger one", "seed": 0}, "metrics": {"f1": 0.5}, "parity": {"fp32": {"passed": True}},
            "cpu": [], "digest": "",
        }  # fmt: skip
        return pack(out, Manifest(**(manifest | changes)), **files)

    return pack_bert


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_tokenizer_that_padded_every_text_pads_none_in_the_bundle(
    bert: Exported, packed: Packer, tmp_path: Path
) -> None:
    assert len(Tokenizer.from_file(str(bert.checkpoint / "tokenizer.json")).encode("rome")) == 16
    out = packed(tmp_path / "places")
    assert len(Tokenizer.from_file(str(out / "tokenizer.json")).encode("rome")) == 3
    assert len(load_tokenizer(out, MAX_LENGTH).encode("rome " * 100)) == MAX_LENGTH
    assert len(Tokenizer.from_file(str(out / "tokenizer.json")).encode("rome " * 100)) == 102


def test_the_tokenizer_names_its_class_length_and_special_tokens_for_every_reader(
    bert: Exported, packed: Packer, tmp_path: Path
) -> None:
    out = packed(tmp_path / "places", max_length=20)
    saved, written = (json.loads((at / "tokenizer_config.json").read_text()) for at in (bert.checkpoint, out))
    assert saved["tokenizer_class"] in ("TokenizersBackend", "PreTrainedTokenizerFast")  # by version of transformers
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["model_max_length"] == 20
    assert written["model_input_names"] == list(bert.info.inputs)
    assert not {"local_files_only", "is_local", "max_length"} & set(written)
    # The map is made where the tokenizer came without one.
    special = json.loads((out / "special_tokens_map.json").read_text())
    assert (special["cls_token"], special["pad_token"]) == ("[CLS]", "[PAD]")
    named = special_tokens_map({"pad_token": {"content": "<pad>", "lstrip": False}, "bos_token": None, "other": "x"})
    assert json.loads(named) == {"pad_token": "<pad>"}


def test_equal_inputs_give_equal_bytes_and_what_reports_say_of_the_moment_is_not_in_the_digest(
    packed: Packer, bert: Exported, tmp_path: Path
) -> None:
    reports = {"README.md": b"# places\n", "report.html": b"1 ms", "report.json": b'{"ms": 1}\n'}
    later = {**reports, "report.html": b"2 ms", "report.json": b'{"ms": 2}\n'}
    one, same, other = (
        packed(tmp_path / name, extra_files=files)
        for name, files in (("one", reports), ("same", reports), ("other", later))
    )
    assert (one / "manifest.json").read_bytes() == (same / "manifest.json").read_bytes()
    first, second = (open_bundle(out).manifest for out in (one, other))
    assert first.digest == second.digest
    assert first.files["report.html"] != second.files["report.html"]
    for name, change in (
        ("graph", {"onnx_files": dict.fromkeys(("fp32", "int8"), bert.onnx_file)}),
        ("scores", {"metrics": {"f1": 0.6}}),
    ):
        changed = packed(tmp_path / name, extra_files=reports, **change)
        assert open_bundle(changed).manifest.digest != first.digest


def test_where_the_weights_once_lay_is_not_told(bert: Exported, packed: Packer, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(bert.checkpoint, tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/someone/secret"}))
    assert "secret" not in (packed(tmp_path / "places", checkpoint=checkpoint) / "config.json").read_text()


def test_the_manifest_says_what_each_variant_needs_what_runs_it_and_how_sure_it_is(
    packed: Packer, tmp_path: Path
) -> None:
    needed = ["avx512_vnni", "arm64"]
    told = {"cpu": needed, "runtime": "openvino", "temperature": 1.5, "abstain_below": 0.25}
    out = packed(tmp_path / "places", int8=told)
    found = open_bundle(out).manifest.variants
    plain = {"cpu": [], "runtime": "onnxruntime", "temperature": 1.0, "abstain_below": None}
    for name, expected in (("int8", told), ("fp32", plain)):
        assert {field: getattr(found[name], field) for field in expected} == expected
    # What an older server reads: the needs of what is served unless another is asked for.
    assert json.loads((out / "manifest.json").read_text())["cpu"] == needed
    needless = packed(tmp_path / "needless", int8={"cpu": needed}, default_variant="fp32")
    assert json.loads((needless / "manifest.json").read_text())["cpu"] == []


def test_a_crash_midway_leaves_nothing(packed: Packer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serve.files, "sync", fail)
    with pytest.raises(OSError, match="No space left"):
        packed(tmp_path / "places")
    assert entries(tmp_path) == []


def test_a_failed_replacement_leaves_the_old_bundle(
    packed: Packer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = packed(tmp_path / "places")
    before, rename = open_bundle(out).manifest.digest, os.rename

    def fail_into_place(source: Path, target: Path) -> None:
        if target == out and source.suffix == ".partial":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_into_place)
    with pytest.raises(OSError, match="Input/output error"):
        packed(out, metrics={"f1": 0.6})
    assert open_bundle(out).manifest.digest == before
    assert entries(tmp_path) == ["places"]


def test_an_older_bundle_is_replaced_even_when_damaged(packed: Packer, tmp_path: Path) -> None:
    out = packed(tmp_path / "places")
    (out / "config.json").write_text("{}\n")
    with pytest.raises(BundleError, match=r"config\.json"):
        open_bundle(out)
    packed(out, metrics={"f1": 0.6})
    assert open_bundle(out).manifest.metrics == {"f1": 0.6}
    assert entries(tmp_path) == ["places"]


def test_anything_else_at_the_target_is_refused_and_kept(packed: Packer, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("years of work")
    with pytest.raises(BadInput, match="not a bundle"):
        packed(folder)
    (folder / "manifest.json").write_text('{"files": {}, "digest": "0"}')
    with pytest.raises(BadInput, match="not a bundle"):
        packed(folder)
    with pytest.raises(BadInput, match="not a folder"):
        packed(folder / "chapter.txt")
    assert (folder / "chapter.txt").read_text() == "years of work"


def test_a_bundle_with_other_files_is_not_replaced_but_for_what_a_mac_leaves(packed: Packer, tmp_path: Path) -> None:
    out = packed(tmp_path / "places")
    for folder in (out, out / "onnx"):
        (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    packed(out)
    assert not (out / ".DS_Store").exists()
    (out / ".git").mkdir()
    for name in (".git/HEAD", "notes.txt"):
        (out / name).write_text("mine")
        with pytest.raises(BadInput, match=rf"{name}\)"):
            packed(out)
        (out / name).unlink()


def test_bundles_that_cannot_be_packed_are_refused_by_name(packed: Packer, bert: Exported, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint": tmp_path}, r"config\.json, tokenizer\.json, tokenizer_config\.json, model\.safetensors"),
        ({"onnx_files": {"int3": bert.onnx_file}}, "int3"),
        ({"default_variant": "fp16"}, "fp16"),
        ({"onnx_files": {"int8": bert.onnx_file}}, "fp32"),
    ]
    outside = ("../README.md", "/README.md", "manifest.json", ONNX_NAMES["fp32"], "a//b")
    wrong += [({"extra_files": {path: b""}}, "extra file") for path in outside]
    for changes, named in wrong:
        with pytest.raises(BadInput, match=named):
            packed(tmp_path / "places", **changes)
    assert entries(tmp_path) == []
