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
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from server_process import serving, until

from benchmarks.export.corruptions import unnoticed
from serve.bundle.manifest import MAX_MANIFEST_BYTES, canonical_json, digest, sha256_file, verify
from serve.bundle.runtimes import choose
from serve.errors import BadInput, BundleError
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle

Copy = Callable[[Path], Path]


def test_an_intact_bundle_opens_and_names_its_graph(entities_bundle: Path) -> None:
    bundle = open_bundle(entities_bundle)

    assert bundle.manifest == verify(str(entities_bundle))
    assert bundle.onnx_file() == bundle.onnx_file("fp32") == entities_bundle / "onnx" / "model.onnx"
    with pytest.raises(BadInput, match="'cities' has no variant 'int8'; give one of 'fp32'"):
        bundle.onnx_file("int8")


def test_every_file_is_watched_byte_by_byte(entities_bundle: Path, bundle_copy: Path) -> None:
    names = json.loads((entities_bundle / "manifest.json").read_text())["files"]
    assert len(names) >= 2
    for name in names:
        file = bundle_copy / name
        intact = file.read_bytes()
        file.write_bytes(intact[:10] + bytes([intact[10] ^ 1]) + intact[11:])
        with pytest.raises(BundleError, match=f"{name} was changed"):
            open_bundle(bundle_copy)
        file.write_bytes(intact)
    open_bundle(bundle_copy)


def test_all_faults_are_told_at_once(bundle_copy: Path) -> None:
    (bundle_copy / "tokenizer.json").unlink()
    with (bundle_copy / "onnx" / "model.onnx").open("ab") as file:
        file.write(b"!")
    (bundle_copy / "onnx" / "notes.txt").write_text("mine")

    with pytest.raises(BundleError) as caught:
        open_bundle(bundle_copy)

    assert "tokenizer.json is missing" in caught.value.message
    assert "onnx/model.onnx has" in caught.value.message
    assert "onnx/notes.txt is not in the manifest" in caught.value.message


def test_a_changed_manifest_does_not_match_its_digest(bundle_copy: Path) -> None:
    manifest = json.loads((bundle_copy / "manifest.json").read_text())
    manifest["max_length"] += 1
    (bundle_copy / "manifest.json").write_bytes(canonical_json(manifest))

    with pytest.raises(BundleError, match=r"manifest\.json was changed"):
        open_bundle(bundle_copy)


def fp32_with(**changes: object) -> dict[str, dict[str, object]]:
    """The variants of a bundle with one, some of it changed."""
    return {"fp32": {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", **changes}}


FILE = {"sha256": "", "bytes": 0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"schema_version": 4, "labels": None}, "schema_version 4", id="too-new"),
        pytest.param({"schema_version": 0}, "first version", id="before-the-first-version"),
        pytest.param({"labels": None, "cpu": None}, "'labels', 'cpu'", id="keys-missing"),
        pytest.param({"task": "fill-mask"}, "fill-mask", id="unknown-task"),
        pytest.param({"labels": "city"}, "array", id="labels-not-a-list"),
        pytest.param({"labels": ["O", "O"]}, "label 'O'", id="labels-twice"),
        pytest.param({"multi_label": True}, "multi_label", id="tags-that-all-may-apply"),
        pytest.param({"name": ""}, "name", id="no-name"),
        pytest.param({"max_length": 0}, "max_length", id="no-length"),
        pytest.param({"default_variant": "int4"}, "int4", id="default-not-there"),
        pytest.param({"variants": fp32_with(file="x.onnx")}, "x.onnx", id="variant-without-its-file"),
        pytest.param({"variants": fp32_with(temperature=0)}, "temperature 0", id="frozen"),
        pytest.param({"variants": fp32_with(temperature=-1.5)}, "temperature -1.5", id="below-zero"),
        pytest.param({"variants": fp32_with(temperature=None)}, "float", id="no-temperature"),
        pytest.param({"variants": fp32_with(abstain_below=1.5)}, "below 1.5", id="above-certain"),
        pytest.param({"variants": fp32_with(abstain_below=-0.1)}, "below -0.1", id="below-impossible"),
        pytest.param({"variants": fp32_with(promises={"recall=0.9": 1.5})}, "recall=0.9", id="promise-above-certain"),
        pytest.param({"variants": fp32_with(validation_scores={"texts": 0, "mean": 0.5, "deviation": 0.1})},
                     "validation_scores", id="scores-of-no-text"),
        pytest.param({"variants": fp32_with(validation_scores={"texts": 5, "mean": 1.5, "deviation": 0.1})},
                     "validation_scores", id="scores-above-certain"),
        pytest.param({"variants": fp32_with(validation_scores={"texts": 5, "mean": 0.5, "deviation": 0.1, "tokens_mean": -1.0})},
                     "validation_scores", id="texts-shorter-than-nothing"),
        pytest.param({"task": "text-regression", "labels": ["a", "b"]}, "2 labels", id="two-numbers"),
        pytest.param({"task": "text-regression", "labels": ["score"], "multi_label": True}, "multi_label", id="a-number-that-applies"),
        pytest.param({"task": "question-answering", "labels": ["start"]}, "1 labels", id="an-answer-without-an-end"),
        pytest.param({"task": "feature-extraction", "labels": [], "vector_width": 0}, "vector_width", id="vectors-of-nothing"),
        pytest.param({"task": "feature-extraction", "labels": ["a"], "vector_width": 4}, "labels", id="vectors-with-labels"),
        pytest.param({"task": "text-classification", "labels": ["a"], "vector_width": 4}, "vector_width", id="classes-with-vectors"),
        pytest.param({"files": {"../a": FILE}}, "'../a'", id="path-up"),
        pytest.param({"files": {"/a": FILE}}, "'/a'", id="absolute-path"),
        pytest.param({"files": {"a//b": FILE}}, "'a//b'", id="two-names-for-one"),
        pytest.param({"files": {"a.bin": FILE}}, "pickle", id="pickle"),
        pytest.param({"files": {"a": {"sha256": "", "bytes": 2**60}}}, "1,152,921", id="huge-file"),
        pytest.param({"files": {"a": {"sha256": "", "bytes": -1}}}, "-1 bytes", id="less-than-nothing"),
        pytest.param({"files": {f"f{i}": FILE for i in range(1_001)}}, "1,001 files", id="many-files"),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_right_is_refused(bundle_copy: Path, changes: dict[str, object], named: str) -> None:
    write_manifest(bundle_copy, **changes)
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle_copy)
    assert named in caught.value.message


def test_a_graph_unlike_its_manifest_is_refused(entities_bundle: Path, vectors_bundle: Path, copied: Copy) -> None:
    narrow = {"task": "feature-extraction", "labels": [], "vector_width": 3}
    for bundle, changes, shape in (
        (entities_bundle, {"labels": ["O", "B-city"]}, r"\[3, 3\]"),
        (entities_bundle, {"task": "text-classification"}, r"\[3, 3\]"),
        (vectors_bundle, narrow, r"\[4\]"),
    ):
        folder = copied(bundle)
        write_manifest(folder, **changes)
        with pytest.raises(BundleError, match=f"shape {shape}"):
            Pipeline(folder)
        shutil.rmtree(folder)


def test_a_variant_has_a_temperature_and_a_threshold_or_their_defaults(
    entities_bundle: Path, bundle_copy: Path
) -> None:
    (plain,) = open_bundle(entities_bundle).manifest.variants.values()
    assert (plain.temperature, plain.abstain_below) == (1.0, None)
    write_manifest(bundle_copy, variants=fp32_with(temperature=1.25, abstain_below=0.5))
    (found,) = open_bundle(bundle_copy).manifest.variants.values()
    assert (found.temperature, found.abstain_below) == (1.25, 0.5)


def test_keys_of_a_later_program_are_left_unread(bundle_copy: Path) -> None:
    write_manifest(bundle_copy, mood="calm")
    assert open_bundle(bundle_copy).manifest.name == "cities"


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
    (tmp_path / "notes.txt").touch()
    for path, named in (
        (tmp_path, "manifest.json"),
        (tmp_path / "nowhere", "nowhere"),
        (tmp_path / "notes.txt", "folder"),
    ):
        with pytest.raises(BundleError, match=named):
            open_bundle(path)


def link_out(folder: Path, outside: Path) -> None:
    (folder / "tokenizer.json").rename(outside)
    (folder / "tokenizer.json").symlink_to(outside)


def link_within(folder: Path, outside: Path) -> None:
    (folder / "onnx" / "model.onnx").rename(folder / "onnx" / "real.onnx")
    (folder / "onnx" / "model.onnx").symlink_to("real.onnx")


def link_folder(folder: Path, outside: Path) -> None:
    (folder / "onnx").rename(outside)
    (folder / "onnx").symlink_to(outside, target_is_directory=True)


def link_to_itself(folder: Path, outside: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")


def link_more(folder: Path, outside: Path) -> None:
    outside.mkdir()
    (folder / "more").symlink_to(outside, target_is_directory=True)


def make_pipe(folder: Path, outside: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def add_odd_name(folder: Path, outside: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\x1b.json")).touch()


def reformat_manifest(folder: Path, outside: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"\n", b"\r", 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(link_out, r"tokenizer\.json is a link out of the bundle", id="link-out"),
        pytest.param(link_within, r"onnx/model\.onnx is a link, and not a file of its own", id="link-within"),
        pytest.param(link_folder, r"onnx/model\.onnx is a link out of the bundle", id="folder-that-is-a-link"),
        pytest.param(link_to_itself, r"tokenizer\.json is a link", id="link-to-itself"),
        pytest.param(link_more, "more is not in the manifest", id="link-to-another-folder"),
        pytest.param(make_pipe, r"tokenizer\.json is not a regular file", id="pipe"),
        pytest.param(add_odd_name, r"\\udcff\\x1b\.json is not in the manifest", id="name-that-is-no-text"),
        pytest.param(lambda folder, _: (folder / "onnx" / "more").mkdir(), "onnx/more/ is not in", id="empty-folder"),
        pytest.param(reformat_manifest, "formatted", id="manifest-that-only-looks-the-same"),
    ],
)
def test_a_folder_that_is_not_just_what_its_manifest_lists_is_refused(
    bundle_copy: Path, tmp_path: Path, change: Callable[[Path, Path], None], named: str
) -> None:
    change(bundle_copy, tmp_path / "outside")
    with pytest.raises(BundleError, match=named):
        open_bundle(bundle_copy)


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


def test_links_of_the_hubs_cache_are_followed_to_its_blobs_alone(entities_bundle: Path, tmp_path: Path) -> None:
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


def test_what_a_download_from_the_hub_leaves_beside_the_files_is_let_be(bundle_copy: Path) -> None:
    (bundle_copy / ".gitattributes").write_text("*.onnx filter=lfs\n")
    (bundle_copy / ".cache" / "huggingface" / "download").mkdir(parents=True)
    (bundle_copy / ".cache" / "huggingface" / "download" / "config.json.metadata").write_text("0123\n")
    assert open_bundle(bundle_copy).manifest.name == "cities"


ODD_NAMES = [
    "a\0.json", "\0", "a\x1b[2J.json", "a\n.json", "a\u2028.json", "a\u202e.json", "/etc/a.json", "../a.json", "a/../b.json", "./a.json",
    "a//b.json", "a\\b.json", "", "..", "a" * 300 + ".json", "é" * 130 + ".json", "a/" * 3000 + "b.json",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_in_the_manifest_is_the_bundles_fault(bundle_copy: Path, name: str) -> None:
    listed = json.loads((bundle_copy / "manifest.json").read_text())["files"]
    write_manifest(bundle_copy, files={**listed, name: {"sha256": "", "bytes": 0}})
    with pytest.raises(BundleError, match="is not a plain path inside the bundle") as caught:
        open_bundle(bundle_copy)
    assert caught.value.message.isprintable()


def test_what_could_be_a_pickle_is_refused_whatever_it_is_called(bundle_copy: Path) -> None:
    (bundle_copy / "config.json").write_bytes(pickle.dumps({"a": 1}))
    write_manifest(bundle_copy)
    with pytest.raises(BundleError, match=r"config\.json starts like a pickle"):
        open_bundle(bundle_copy)


def test_a_manifest_too_long_to_be_one_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(BundleError, match="a manifest may have 16,777,216"):
        open_bundle(tmp_path)


def test_the_first_schema_is_read_and_what_it_asks_of_processors_is_the_default_variants(bundle_copy: Path) -> None:
    write_manifest(bundle_copy, schema_version=1, cpu=["avx512_vnni"])
    assert open_bundle(bundle_copy).variant()[1].cpu == ["avx512_vnni"]
    write_manifest(bundle_copy, schema_version=2, cpu=["avx512_vnni"])
    assert open_bundle(bundle_copy).variant()[1].cpu == []


@pytest.mark.parametrize("version", [1, 2])
def test_a_bundle_of_an_older_schema_is_checked_by_the_digest_of_all_its_files(bundle_copy: Path, version: int) -> None:
    (bundle_copy / "report.json").write_bytes(b"{}\n")
    manifest = json.loads((bundle_copy / "manifest.json").read_text())
    del manifest["digest"]
    manifest["schema_version"] = version
    manifest["files"]["report.json"] = {"sha256": hashlib.sha256(b"{}\n").hexdigest(), "bytes": 3}
    of_all = hashlib.sha256(canonical_json(manifest)).hexdigest()

    (bundle_copy / "manifest.json").write_bytes(canonical_json({**manifest, "digest": of_all}))
    assert open_bundle(bundle_copy).manifest.digest == of_all

    manifest["files"]["report.json"]["bytes"] = 4
    (bundle_copy / "manifest.json").write_bytes(canonical_json({**manifest, "digest": of_all}))
    with pytest.raises(BundleError, match=r"manifest\.json was changed"):
        open_bundle(bundle_copy)


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


def test_what_git_and_a_mac_leave_in_a_bundles_folder_is_let_be(bundle_copy: Path) -> None:
    (bundle_copy / ".git" / "refs" / "tags").mkdir(parents=True)
    (bundle_copy / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (bundle_copy / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (bundle_copy / "onnx" / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    assert open_bundle(bundle_copy).manifest.name == "cities"
    shutil.rmtree(bundle_copy / ".git")
    (bundle_copy / ".git").write_text("gitdir: ../.git/modules/cities\n")  # of a submodule or a worktree
    assert open_bundle(bundle_copy).manifest.name == "cities"
    (bundle_copy / ".gitignore").write_text("*.log\n")
    (bundle_copy / "onnx" / ".git").mkdir()
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle_copy)
    assert ".gitignore is not in the manifest" in caught.value.message
    assert "onnx/.git/ is not in the manifest" in caught.value.message


def test_an_edited_model_card_is_told_and_not_refused(bundle_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    card = bundle_copy / "README.md"
    card.write_text("# cities\n")
    write_manifest(bundle_copy)
    assert choose(open_bundle(bundle_copy)).notes == ()
    card.write_text("# cities\n\nFound by the support team.\n")
    (note,) = choose(open_bundle(bundle_copy)).notes
    assert "README.md of 'cities' was edited" in note
    assert Pipeline(bundle_copy)("rome")["truncated"] is False
    assert note in caplog.messages


def test_a_model_card_that_is_missing_or_a_link_or_a_pickle_is_refused(bundle_copy: Path, tmp_path: Path) -> None:
    card = bundle_copy / "README.md"
    card.write_text("# cities\n")
    write_manifest(bundle_copy)
    card.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(BundleError, match=r"README\.md starts like a pickle"):
        open_bundle(bundle_copy)
    card.unlink()
    with pytest.raises(BundleError, match=r"README\.md is missing"):
        open_bundle(bundle_copy)
    (tmp_path / "elsewhere.md").write_text("# other\n")
    card.symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(BundleError, match=r"README\.md is a link out of the bundle"):
        open_bundle(bundle_copy)


def test_every_one_of_many_random_corruptions_is_refused_by_name(entities_bundle: Path) -> None:
    passed, outcomes = unnoticed(entities_bundle, count=400, seed=1)
    assert not passed
    assert outcomes == {"named": 400}


def test_a_bundle_that_is_moved_to_the_place_of_another_serves_under_its_name(
    bundle_copy: Path, tmp_path: Path
) -> None:
    folder, new = bundle_copy, Path(shutil.copytree(bundle_copy, tmp_path / "new"))
    write_manifest(new, name="my-bundle.new", max_length=31)
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
