import hashlib
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from server_process import serving, until

from serve.bundle.manifest import MAX_MANIFEST_BYTES, canonical_json, digest, sha256_file, verify
from serve.bundle.runtimes import choose
from serve.errors import BadInput, BundleError
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle

Copy = Callable[[Path], Path]
Writer = Callable[..., None]


def test_an_intact_bundle_opens_and_names_its_graph(entities_bundle: Path) -> None:
    bundle = open_bundle(entities_bundle)

    assert bundle.manifest == verify(str(entities_bundle))
    assert bundle.onnx_file() == bundle.onnx_file("fp32") == entities_bundle / "onnx" / "model.onnx"
    with pytest.raises(BadInput, match="'cities' has no variant 'int8'; give one of 'fp32'"):
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


def fp32_with(**changes: object) -> dict[str, dict[str, object]]:
    """The variants of a bundle with one, some of it changed."""
    return {"fp32": {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"schema_version": 4, "labels": None}, "schema_version 4, and this program reads", id="too-new"),
        pytest.param({"labels": None, "cpu": None}, "lacks 'labels', 'cpu'", id="keys-missing"),
        pytest.param({"task": "fill-mask"}, "Invalid enum value 'fill-mask'", id="unknown-task"),
        pytest.param({"labels": "city"}, "Expected `array`", id="labels-not-a-list"),
        pytest.param(
            {"labels": ["O", "O"]}, "the label 'O' stands for several numbers of the model", id="labels-twice"
        ),
        pytest.param({"schema_version": 0}, "the first version is 1", id="before-the-first-version"),
        pytest.param({"multi_label": True}, "multi_label is for text-classification", id="tags-that-all-may-apply"),
        pytest.param({"name": ""}, "name is empty", id="no-name"),
        pytest.param({"max_length": 0}, "max_length is 0", id="no-length"),
        pytest.param({"default_variant": "int4"}, "default_variant 'int4' is not among", id="default-not-there"),
        pytest.param(
            {"variants": {"fp32": {"file": "x.onnx", "scheme": "fp32", "runtime": "onnxruntime"}}},
            "'x.onnx' of variant 'fp32' is not among the files",
            id="variant-without-its-file",
        ),
        pytest.param(
            {"variants": fp32_with(temperature=0)}, "has the temperature 0, not a number above 0", id="frozen"
        ),
        pytest.param({"variants": fp32_with(temperature=-1.5)}, "has the temperature -1.5, not", id="below-zero"),
        pytest.param({"variants": fp32_with(abstain_below=1.5)}, "abstains below 1.5, not a prob", id="above-certain"),
        pytest.param({"variants": fp32_with(abstain_below=-0.1)}, "abstains below -0.1, not a", id="below-impossible"),
        pytest.param({"variants": fp32_with(temperature=None)}, "Expected `float`", id="no-temperature"),
        pytest.param({"files": {"../a": {"sha256": "", "bytes": 0}}}, "'../a' is not a plain path", id="path-up"),
        pytest.param({"files": {"a": {"sha256": "", "bytes": 2**60}}}, "has 1,152,921", id="huge-file"),
        pytest.param({"files": {"a": {"sha256": "", "bytes": -1}}}, "has -1 bytes", id="less-than-nothing"),
        pytest.param({"files": {"a.bin": {"sha256": "", "bytes": 0}}}, "'a.bin' may be a pickle", id="pickle"),
        pytest.param(
            {"files": {f"f{i}": {"sha256": "", "bytes": 0} for i in range(1_001)}}, "lists 1,001 files", id="many-files"
        ),
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


def test_a_variant_says_how_sure_it_is_and_those_of_older_bundles_are_as_sure_as_their_logits(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer
) -> None:
    (plain,) = open_bundle(entities_bundle).manifest.variants.values()
    assert (plain.temperature, plain.abstain_below) == (1.0, None)
    folder = copied(entities_bundle)
    manifest_writer(folder, variants=fp32_with(temperature=1.25, abstain_below=0.5))
    (found,) = open_bundle(folder).manifest.variants.values()
    assert (found.temperature, found.abstain_below) == (1.25, 0.5)


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
    with pytest.raises(
        BundleError, match=r"nowhere does not exist; give a bundle, .* `stillroom run`, `demo` or `export`"
    ):
        open_bundle(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BundleError, match=r"notes\.txt is not a folder; give a bundle"):
        open_bundle(tmp_path / "notes.txt")


def test_links_may_not_leave_the_bundle(entities_bundle: Path, copied: Copy, tmp_path: Path) -> None:
    folder = copied(entities_bundle)
    outside = tmp_path / "outside.json"
    (folder / "tokenizer.json").rename(outside)
    (folder / "tokenizer.json").symlink_to(outside)
    with pytest.raises(BundleError, match=r"tokenizer\.json is a link out of the bundle"):
        open_bundle(folder)


def test_links_within_the_bundle_are_refused_too_and_folders_that_are_links(
    entities_bundle: Path, copied: Copy, tmp_path: Path
) -> None:
    folder = copied(entities_bundle)
    (folder / "onnx").rename(tmp_path / "elsewhere")
    (folder / "onnx").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(BundleError, match=r"onnx/model\.onnx is a link out of the bundle"):
        open_bundle(folder)
    (folder / "onnx").unlink()
    (tmp_path / "elsewhere").rename(folder / "onnx")
    (folder / "onnx" / "model.onnx").rename(folder / "onnx" / "real.onnx")
    (folder / "onnx" / "model.onnx").symlink_to("real.onnx")
    with pytest.raises(BundleError, match=r"onnx/model\.onnx is a link, and not a file of its own"):
        open_bundle(folder)


def in_a_hub_cache(bundle: Path, cache: Path) -> Path:
    """`bundle` as `huggingface_hub.snapshot_download` keeps it: every file of the snapshot a link to a blob."""
    snapshot = cache / "models--some--cities" / "snapshots" / "0123abcd"
    blobs = cache / "models--some--cities" / "blobs"
    blobs.mkdir(parents=True)
    files = sorted(path.relative_to(bundle) for path in bundle.rglob("*") if path.is_file())
    for number, file in enumerate(files):
        (blobs / str(number)).write_bytes((bundle / file).read_bytes())
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    (snapshot / ".gitattributes").write_text("*.onnx filter=lfs\n")
    return snapshot


def test_links_of_the_hubs_cache_are_followed_to_its_blobs_and_nowhere_else(
    entities_bundle: Path, tmp_path: Path
) -> None:
    snapshot = in_a_hub_cache(entities_bundle, tmp_path / "hub")
    assert open_bundle(snapshot).manifest.name == "cities"
    assert Pipeline(snapshot)("rome")["truncated"] is False

    secret = tmp_path / "hub" / "models--some--cities" / "secret.json"
    secret.write_bytes((entities_bundle / "tokenizer.json").read_bytes())
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(secret)
    with pytest.raises(BundleError, match=r"tokenizer\.json is a link out of the bundle"):
        open_bundle(snapshot)


def test_a_folder_of_blobs_that_is_itself_a_link_is_not_the_hubs(entities_bundle: Path, tmp_path: Path) -> None:
    snapshot = in_a_hub_cache(entities_bundle, tmp_path / "hub")
    blobs = tmp_path / "hub" / "models--some--cities" / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(BundleError, match="is a link out of the bundle"):
        open_bundle(snapshot)


def test_what_a_download_from_the_hub_leaves_beside_the_files_is_let_be(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    (folder / ".gitattributes").write_text("*.onnx filter=lfs\n")
    (folder / ".cache" / "huggingface" / "download").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "download" / "config.json.metadata").write_text("0123\n")
    assert open_bundle(folder).manifest.name == "cities"


def test_a_link_to_itself_is_a_fault_like_others(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(BundleError, match=r"tokenizer\.json is a link"):
        open_bundle(folder)


ODD_NAMES = [
    "a\0.json", "\0", "a\x1b[2J.json", "a\n.json", "a\u2028.json", "a\u202e.json", "/etc/a.json", "../a.json", "a/../b.json", "./a.json",
    "a//b.json", "a\\b.json", "", "..", "a" * 300 + ".json", "é" * 130 + ".json", "a/" * 3000 + "b.json",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_in_the_manifest_is_the_bundles_fault(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer, name: str
) -> None:
    folder = copied(entities_bundle)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    manifest_writer(folder, files={**listed, name: {"sha256": "", "bytes": 0}})
    with pytest.raises(BundleError, match="is not a plain path inside the bundle") as caught:
        open_bundle(folder)
    assert caught.value.message.isprintable()


def test_a_file_whose_name_is_no_text_is_named(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\x1b.json")).touch()
    with pytest.raises(BundleError, match=r"\\udcff\\x1b\.json is not in the manifest"):
        open_bundle(folder)


def test_a_server_reloads_a_bundle_again_after_one_with_an_odd_name(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer
) -> None:
    folder = copied(entities_bundle)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    reloads = 'stillroom_reloads_total{{model="cities",result="{}"}}'
    with serving(folder) as server:
        manifest_writer(folder, files={**listed, "a\0.json": {"sha256": "", "bytes": 0}})
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.metric(reloads.format("failed")) == 1)
        manifest_writer(folder, max_length=31)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.metric(reloads.format("done")) == 1)


def test_a_bundle_that_is_moved_to_the_place_of_another_serves_under_its_name(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer, tmp_path: Path
) -> None:
    folder = copied(entities_bundle)
    new = folder.rename(tmp_path / "new")
    copied(entities_bundle)
    manifest_writer(new, name="my-bundle.new", max_length=31)
    after = open_bundle(new).manifest.digest

    def described() -> dict[str, object]:
        (model,) = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["models"]
        return model  # type: ignore[no-any-return]

    with serving(folder) as server:
        name = described()["name"]
        for before, now in ((folder, folder.with_name("old")), (new, folder)):
            before.rename(now)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: described()["digest"] == after)
        assert described()["name"] == name
        asked = {"text": "fly to Rome", "model": name}
        answer = httpx.post(f"{server.url}/v1/entities", json=asked, timeout=PATIENCE_S).json()
        assert answer["model"] == name


def test_what_could_be_a_pickle_is_refused_whatever_it_is_called(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer
) -> None:
    folder = copied(entities_bundle)
    (folder / "config.json").write_bytes(pickle.dumps({"a": 1}))
    manifest_writer(folder)
    with pytest.raises(BundleError, match=r"config\.json starts like a pickle"):
        open_bundle(folder)


def test_what_is_no_plain_file_is_not_waited_for(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a regular file"):
        open_bundle(folder)


def test_an_empty_folder_is_noticed(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    (folder / "onnx" / "more").mkdir()
    with pytest.raises(BundleError, match="onnx/more/ is not in the manifest"):
        open_bundle(folder)


def test_a_manifest_that_only_looks_the_same_is_not(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"\n", b"\r", 1))
    with pytest.raises(BundleError, match="its JSON is not formatted as it was written"):
        open_bundle(folder)


def test_a_manifest_too_long_to_be_one_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(BundleError, match="a manifest may have 16,777,216"):
        open_bundle(tmp_path)


def test_the_first_schema_is_read_and_what_it_asks_of_processors_is_the_default_variants(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer
) -> None:
    folder = copied(entities_bundle)
    manifest_writer(folder, schema_version=1, cpu=["avx512_vnni"])
    assert open_bundle(folder).variant()[1].cpu == ["avx512_vnni"]
    manifest_writer(folder, schema_version=2, cpu=["avx512_vnni"])
    assert open_bundle(folder).variant()[1].cpu == []


@pytest.mark.parametrize("version", [1, 2])
def test_a_bundle_of_an_older_schema_is_checked_by_the_digest_of_all_its_files(
    entities_bundle: Path, copied: Copy, version: int
) -> None:
    folder = copied(entities_bundle)
    (folder / "report.json").write_bytes(b"{}\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["digest"]
    manifest["schema_version"] = version
    manifest["files"]["report.json"] = {"sha256": hashlib.sha256(b"{}\n").hexdigest(), "bytes": 3}
    of_all = hashlib.sha256(canonical_json(manifest)).hexdigest()

    (folder / "manifest.json").write_bytes(canonical_json({**manifest, "digest": of_all}))
    assert open_bundle(folder).manifest.digest == of_all

    manifest["files"]["report.json"]["bytes"] = 4
    (folder / "manifest.json").write_bytes(canonical_json({**manifest, "digest": of_all}))
    with pytest.raises(BundleError, match=r"manifest\.json was changed"):
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


def test_the_digest_covers_everything_but_itself_card_and_reports() -> None:
    files = {name: {"sha256": "0", "bytes": 1} for name in ("README.md", "report.html", "report.json", "config.json")}
    manifest: dict[str, object] = {"name": "a", "labels": ["x"], "files": files}
    for name, about_it in {"README.md": True, "report.html": True, "report.json": True, "config.json": False}.items():
        changed = {**manifest, "files": {**files, name: {"sha256": "1", "bytes": 1}}}
        assert (digest(changed) == digest(manifest)) is about_it, name
    assert digest(manifest) == digest({**manifest, "digest": "anything"})
    assert digest(manifest) != digest({**manifest, "labels": ["y"]})


def test_sha256_of_a_known_text(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    assert sha256_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_what_git_and_a_mac_leave_in_a_bundles_folder_is_let_be(entities_bundle: Path, copied: Copy) -> None:
    folder = copied(entities_bundle)
    (folder / ".git" / "refs" / "tags").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (folder / "onnx" / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    assert open_bundle(folder).manifest.name == "cities"
    shutil.rmtree(folder / ".git")
    (folder / ".git").write_text("gitdir: ../.git/modules/cities\n")  # of a submodule or a worktree
    assert open_bundle(folder).manifest.name == "cities"
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "onnx" / ".git").mkdir()
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert ".gitignore is not in the manifest" in caught.value.message
    assert "onnx/.git/ is not in the manifest" in caught.value.message


def test_an_edited_model_card_is_told_and_not_refused(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(entities_bundle)
    card = folder / "README.md"
    card.write_text("# cities\n")
    manifest_writer(folder)
    assert choose(open_bundle(folder)).notes == ()
    card.write_text("# cities\n\nFound by the support team.\n")
    (note,) = choose(open_bundle(folder)).notes
    assert "README.md of 'cities' was edited" in note
    assert Pipeline(folder)("rome")["truncated"] is False
    assert note in caplog.messages


def test_a_model_card_that_is_missing_or_a_link_or_could_be_a_pickle_is_refused(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer, tmp_path: Path
) -> None:
    folder = copied(entities_bundle)
    card = folder / "README.md"
    card.write_text("# cities\n")
    manifest_writer(folder)
    card.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(BundleError, match=r"README\.md starts like a pickle"):
        open_bundle(folder)
    card.unlink()
    with pytest.raises(BundleError, match=r"README\.md is missing"):
        open_bundle(folder)
    (tmp_path / "elsewhere.md").write_text("# other\n")
    card.symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(BundleError, match=r"README\.md is a link out of the bundle"):
        open_bundle(folder)
