import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.bundle import canonical_json, digest, open_bundle, sha256_file, verify
from serve.errors import BadInput, BundleError

Copy = Callable[[Path], Path]
Writer = Callable[..., None]


def test_an_intact_bundle_opens_and_names_its_graph(entities_bundle: Path) -> None:
    bundle = open_bundle(entities_bundle)

    assert bundle.manifest == verify(str(entities_bundle))
    assert bundle.onnx_file() == bundle.onnx_file("fp32") == entities_bundle / "onnx" / "model.onnx"
    with pytest.raises(BadInput, match="'int8' of 'cities': the bundle has 'fp32'"):
        bundle.onnx_file("int8")


def test_every_file_is_watched_byte_by_byte(entities_bundle: Path, copied: Copy) -> None:
    names = json.loads((entities_bundle / "manifest.json").read_text())["files"]
    assert len(names) >= 2
    folder = copied(entities_bundle)
    for name in names:
        file = folder / name
        intact = file.read_bytes()
        file.write_bytes(intact[:10] + bytes([intact[10] ^ 1]) + intact[11:])
        with pytest.raises(BundleError, match=f"{name} was changed"):
            open_bundle(folder)
        file.write_bytes(intact)
    open_bundle(folder)


def test_all_faults_are_told_at_once(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    (folder / "tokenizer.json").unlink()
    with (folder / "onnx" / "model.onnx").open("ab") as file:
        file.write(b"!")
    (folder / "onnx" / "notes.txt").write_text("mine")

    with pytest.raises(BundleError) as caught:
        open_bundle(folder)

    assert "tokenizer.json is missing" in caught.value.message
    assert "onnx/model.onnx has" in caught.value.message
    assert "onnx/notes.txt is not in the manifest" in caught.value.message


def test_a_changed_manifest_does_not_match_its_digest(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["max_length"] += 1
    (folder / "manifest.json").write_bytes(canonical_json(manifest))

    with pytest.raises(BundleError, match=r"manifest\.json was changed"):
        open_bundle(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"schema_version": 2, "labels": None}, "schema_version 2, and this program reads", id="too-new"),
        pytest.param({"labels": None, "cpu": None}, "lacks 'labels', 'cpu'", id="keys-missing"),
        pytest.param({"task": "fill-mask"}, "Invalid enum value 'fill-mask'", id="unknown-task"),
        pytest.param({"labels": "city"}, "Expected `array`", id="labels-not-a-list"),
        pytest.param({"labels": ["O", "O"]}, "labels must be different", id="labels-twice"),
        pytest.param({"schema_version": 0}, "the first one is 1", id="before-the-first-version"),
        pytest.param({"multi_label": True}, "multi_label is for text-classification", id="tags-that-all-may-apply"),
        pytest.param({"name": ""}, "name is empty", id="no-name"),
        pytest.param({"max_length": 0}, "max_length is 0", id="no-length"),
        pytest.param({"default_variant": "int4"}, "default_variant 'int4' is not among", id="default-not-there"),
        pytest.param(
            {"variants": {"fp32": {"file": "x.onnx", "scheme": "fp32", "runtime": "onnxruntime"}}},
            "'x.onnx', which is not among the files",
            id="variant-without-its-file",
        ),
        pytest.param({"files": {"../a": {"sha256": "", "bytes": 0}}}, "'../a' is not a plain path", id="path-up"),
        pytest.param({"files": {"/a": {"sha256": "", "bytes": 0}}}, "'/a' is not a plain path", id="absolute-path"),
        pytest.param({"files": {"a//b": {"sha256": "", "bytes": 0}}}, "'a//b' is not a plain", id="two-names-for-one"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer, changes: dict[str, object], message: str
) -> None:
    folder = copied(entities_bundle)
    manifest_writer(folder, **changes)

    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert message in caught.value.message


def test_keys_of_a_later_program_are_left_unread(entities_bundle: Path, copied: Copy, manifest_writer: Writer) -> None:
    folder = copied(entities_bundle)
    manifest_writer(folder, mood="calm")
    assert open_bundle(folder).manifest.name == "cities"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "not an object"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": NaN}', "is not JSON"),
        (b"\xff", "is not JSON"),
    ],
    ids=["cut-off", "a-list", "very-deep", "nan", "not-utf8"],
)
def test_a_manifest_that_is_not_an_object_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match=message):
        open_bundle(tmp_path)


def test_a_folder_that_is_no_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no manifest\.json"):
        open_bundle(tmp_path)
    with pytest.raises(BundleError, match="nowhere is not a folder"):
        open_bundle(tmp_path / "nowhere")


def test_links_may_not_leave_the_bundle(entities_bundle: Path, copied: Copy, tmp_path: Path) -> None:
    folder = copied(entities_bundle)
    outside = tmp_path / "outside.json"
    (folder / "tokenizer.json").rename(outside)
    (folder / "tokenizer.json").symlink_to(outside)
    with pytest.raises(BundleError, match=r"tokenizer\.json is a link that leaves the bundle"):
        open_bundle(folder)


def test_a_link_to_a_folder_is_an_extra_file(entities_bundle: Path, copied: Copy, tmp_path: Path) -> None:
    folder = copied(entities_bundle)
    (folder / "more").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(BundleError, match="more is not in the manifest"):
        open_bundle(folder)


def test_canonical_json_is_one_form_whatever_the_order() -> None:
    assert canonical_json({"b": [1, "é"], "a": 0.5}) == canonical_json({"a": 0.5, "b": [1, "é"]})
    assert canonical_json({"b": 1, "a": "é"}) == '{\n  "a": "é",\n  "b": 1\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


def test_the_digest_covers_everything_but_itself() -> None:
    manifest: dict[str, object] = {"name": "a", "labels": ["x"]}
    assert digest(manifest) == digest({**manifest, "digest": "anything"})
    assert digest(manifest) != digest({**manifest, "labels": ["y"]})


def test_sha256_of_a_known_text(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    assert sha256_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
