import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from small_checkpoints import MAX_LENGTH, TAGS, Exported
from tokenizers import Tokenizer

import serve.files
from export.packing.writer import pack, special_tokens_map
from serve.bundle.manifest import ONNX_NAMES, SCHEMA_VERSION, Manifest, Variant
from serve.errors import BadInput, BundleError
from serve.model.pipeline import Pipeline
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
            "schema_version": SCHEMA_VERSION,
            "name": "places",
            "task": "token-classification",
            "labels": list(bert.info.labels),
            "max_length": MAX_LENGTH,
            "default_variant": "int8",
            "variants": variants,
            "files": {},
            "inputs": list(bert.info.inputs),
            "lineage": {"teacher": "a larger one", "seed": 0},
            "metrics": {"f1": 0.5},
            "parity": {"fp32": {"passed": True}},
            "cpu": [],
            "digest": "",
        }
        return pack(out, Manifest(**(manifest | changes)), **files)

    return pack_bert


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_bundle_opens_and_answers(packed: Packer, tmp_path: Path) -> None:
    out = packed(tmp_path / "places")
    manifest = open_bundle(out).manifest
    assert (manifest.labels, manifest.max_length, manifest.default_variant) == (TAGS, MAX_LENGTH, "int8")
    assert manifest.inputs == ["input_ids", "attention_mask", "token_type_ids"]
    assert {name: variant.file for name, variant in manifest.variants.items()} == {
        "fp32": "onnx/model.onnx",
        "int8": "onnx/model_quantized.onnx",
    }
    answer, other = Pipeline(out, threads=1)(["fly to new york city tomorrow", "cancel"])
    assert {entity["label"] for entity in answer["entities"]} <= {"city", "date"}
    assert other["truncated"] is False
    assert Pipeline(out, variant="fp32", threads=1)("fly to rome")["truncated"] is False
    assert entries(tmp_path) == ["places"]


def test_each_variant_says_how_sure_it_is(packed: Packer, tmp_path: Path) -> None:
    plain = open_bundle(packed(tmp_path / "plain")).manifest.variants
    assert [(each.temperature, each.abstain_below) for each in plain.values()] == [(1.0, None)] * 2
    sure = {"temperature": 1.5, "abstain_below": 0.25}
    told = open_bundle(packed(tmp_path / "told", int8=sure)).manifest.variants
    assert (told["fp32"].temperature, told["fp32"].abstain_below) == (1.0, None)
    assert (told["int8"].temperature, told["int8"].abstain_below) == (1.5, 0.25)


def test_the_folder_opens_in_transformers(packed: Packer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from export.graph.exporter import load_answering_model

    out = packed(tmp_path / "places")
    model = load_answering_model(out)
    assert type(model).__name__.endswith("ForTokenClassification")
    assert [model.config.id2label[index] for index in range(5)] == TAGS
    assert AutoTokenizer.from_pretrained(out)("rome")["input_ids"][0] == 2


def test_a_tokenizer_that_padded_every_text_pads_none_in_the_bundle(
    bert: Exported, packed: Packer, tmp_path: Path
) -> None:
    assert len(Tokenizer.from_file(str(bert.checkpoint / "tokenizer.json")).encode("rome")) == 16
    out = packed(tmp_path / "places")
    assert len(Tokenizer.from_file(str(out / "tokenizer.json")).encode("rome")) == 3
    assert len(load_tokenizer(out, MAX_LENGTH).encode("rome " * 100)) == MAX_LENGTH
    assert len(Tokenizer.from_file(str(out / "tokenizer.json")).encode("rome " * 100)) == 102


def test_special_tokens_are_mapped_when_the_tokenizer_came_without_a_map(packed: Packer, tmp_path: Path) -> None:
    written = json.loads((packed(tmp_path / "places") / "special_tokens_map.json").read_text())
    assert (written["cls_token"], written["pad_token"]) == ("[CLS]", "[PAD]")
    named = special_tokens_map({"pad_token": {"content": "<pad>", "lstrip": False}, "bos_token": None, "other": "x"})
    assert json.loads(named) == {"pad_token": "<pad>"}


def test_equal_inputs_give_equal_bytes(packed: Packer, tmp_path: Path) -> None:
    one, other = packed(tmp_path / "one"), packed(tmp_path / "other")
    assert (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()
    changed = packed(tmp_path / "changed", metrics={"f1": 0.6})
    assert open_bundle(changed).manifest.digest != open_bundle(one).manifest.digest


def test_two_builds_that_differ_in_what_their_reports_say_have_one_digest(
    packed: Packer, bert: Exported, tmp_path: Path
) -> None:
    reports = {"README.md": b"# places\n", "report.html": b"1 ms", "report.json": b'{"ms": 1}\n'}
    one = packed(tmp_path / "one", extra_files=reports)
    other = packed(tmp_path / "other", extra_files={**reports, "report.html": b"2 ms", "report.json": b'{"ms": 2}\n'})
    manifests = [open_bundle(out).manifest for out in (one, other)]
    assert manifests[0].digest == manifests[1].digest
    assert manifests[0].files["report.html"] != manifests[1].files["report.html"]
    changed = packed(
        tmp_path / "changed", extra_files=reports, onnx_files=dict.fromkeys(("fp32", "int8"), bert.onnx_file)
    )
    assert open_bundle(changed).manifest.digest != manifests[0].digest


def test_where_the_weights_once_lay_is_not_told(bert: Exported, packed: Packer, tmp_path: Path) -> None:
    config_file = bert.checkpoint / "config.json"
    before = config_file.read_text()
    try:
        config_file.write_text(json.dumps({**json.loads(before), "_name_or_path": "/home/someone/secret"}))
        out = packed(tmp_path / "places")
    finally:
        config_file.write_text(before)
    assert "secret" not in (out / "config.json").read_text()


def test_the_manifest_says_what_each_variant_needs_and_what_runs_it(packed: Packer, tmp_path: Path) -> None:
    needed = ["avx512_vnni", "arm64"]
    out = packed(tmp_path / "places", int8={"cpu": needed, "runtime": "openvino"})
    manifest = open_bundle(out).manifest
    assert manifest.variants["int8"].cpu == needed
    assert manifest.variants["int8"].runtime == "openvino"
    assert manifest.variants["fp32"].cpu == []
    assert manifest.variants["fp32"].runtime == "onnxruntime"
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
    with pytest.raises(BadInput, match="thesis exists and is not a bundle"):
        packed(folder)
    (folder / "manifest.json").write_text('{"files": {}, "digest": "0"}')
    with pytest.raises(BadInput, match="thesis exists and is not a bundle"):
        packed(folder)
    with pytest.raises(BadInput, match="exists and is not a folder"):
        packed(folder / "chapter.txt")
    assert (folder / "chapter.txt").read_text() == "years of work"


def test_a_bundle_that_holds_somebodys_notes_is_not_replaced(packed: Packer, tmp_path: Path) -> None:
    out = packed(tmp_path / "places")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"also holds other files \(notes\.txt\)"):
        packed(out)
    assert (out / "notes.txt").exists()


def test_what_a_mac_leaves_in_a_bundles_folders_does_not_keep_it_from_being_replaced(
    packed: Packer, tmp_path: Path
) -> None:
    out = packed(tmp_path / "places")
    for folder in (out, out / "onnx"):
        (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    packed(out)
    assert not (out / ".DS_Store").exists()
    (out / ".git").mkdir()
    (out / ".git" / "HEAD").touch()
    with pytest.raises(BadInput, match=r"also holds other files \(\.git/HEAD\)"):
        packed(out)


def test_what_cannot_be_packed_is_named(packed: Packer, bert: Exported, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"lacks config\.json, tokenizer\.json, tokenizer_config\.json, model\.safetensors"
    ):
        packed(tmp_path / "places", checkpoint=tmp_path)
    with pytest.raises(BadInput, match="variants int3"):
        packed(tmp_path / "places", onnx_files={"int3": bert.onnx_file})
    with pytest.raises(BadInput, match="default variant 'fp16'"):
        packed(tmp_path / "places", default_variant="fp16")
    with pytest.raises(BadInput, match="the manifest and the graphs differ in fp32"):
        packed(tmp_path / "places", onnx_files={"int8": bert.onnx_file})
    for path in ("../README.md", "/README.md", "manifest.json", ONNX_NAMES["fp32"], "a//b"):
        with pytest.raises(BadInput, match="extra file"):
            packed(tmp_path / "places", extra_files={path: b""})
    assert entries(tmp_path) == []


def test_the_tokenizer_says_its_class_and_length_so_that_every_reader_understands(
    bert: Exported, packed: Packer, tmp_path: Path
) -> None:
    saved = json.loads((bert.checkpoint / "tokenizer_config.json").read_text())
    written = json.loads((packed(tmp_path / "places", max_length=20) / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] in ("TokenizersBackend", "PreTrainedTokenizerFast")  # by version of transformers
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["model_max_length"] == 20
    assert written["model_input_names"] == list(bert.info.inputs)
    assert not {"local_files_only", "is_local", "max_length"} & set(written)
