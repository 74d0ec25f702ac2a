"""Bundles in S3, as moto's server speaks it. Install s3fs and moto[server] to run it; nothing else in the tests needs them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lookup_bundles import city_table, write_bundle, write_manifest

from serve import Pipeline, open_bundle
from serve.bundle import fetched, remote_files
from serve.bundle.remote_files import Absent, Refused
from serve.errors import BadInput, BundleError
from stillroom import push

s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
moto = pytest.importorskip("moto.server", reason="needs moto[server]")
boto3 = pytest.importorskip("boto3", reason="needs boto3, which moto brings")

pytestmark = pytest.mark.filterwarnings("ignore")  # of moto and of the libraries of Amazon

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, with keys for it in the environment."""
    monkeypatch.setenv(fetched.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.0,))
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    settings = dict.fromkeys(KEYS, "test") | {
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="models")
    yield "s3://models"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def keys_of() -> list[str]:
    return [each["Key"] for each in boto3.client("s3").list_objects_v2(Bucket="models").get("Contents", [])]


def test_a_bundle_goes_to_a_bucket_and_comes_back(bucket: str, tmp_path: Path) -> None:
    bundle, url = write_bundle(tmp_path / "cities", city_table()), f"{bucket}/a/cities"
    assert push(bundle, url)["uploaded"]
    assert keys_of() == ["a/cities/manifest.json", "a/cities/onnx/model.onnx", "a/cities/tokenizer.json"]
    assert not push(bundle, url)["uploaded"]
    assert Pipeline(url)("fly to Rome") == Pipeline(bundle)("fly to Rome")
    other = write_bundle(tmp_path / "other", city_table() + 1)
    (other / "more.json").write_text("{}")
    write_manifest(other)
    with pytest.raises(BadInput, match="holds another bundle"):
        push(other, url)
    assert push(other, url, replace=True)["replaced"]
    assert open_bundle(url).manifest == open_bundle(other).manifest
    assert push(bundle, url, replace=True)["replaced"]
    assert "a/cities/more.json" not in keys_of()
    assert open_bundle(url).manifest == open_bundle(bundle).manifest


def test_a_changed_object_is_refused(bucket: str, tmp_path: Path) -> None:
    push(write_bundle(tmp_path / "cities", city_table()), f"{bucket}/cities")
    boto3.client("s3").put_object(Bucket="models", Key="cities/tokenizer.json", Body=b"{}")
    with pytest.raises(BundleError, match=r"tokenizer.json has 2 bytes instead of"):
        open_bundle(f"{bucket}/cities")


def test_missing_files_buckets_and_keys_of_a_store_are_named(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle(tmp_path / "cities", city_table())
    with pytest.raises(Absent, match=r"there is no s3://models/none/manifest.json"):
        open_bundle(f"{bucket}/none")
    with pytest.raises(Absent, match=r"there is no s3://nosuch/ner/manifest.json"):
        open_bundle("s3://nosuch/ner")
    with pytest.raises(BadInput, match="there is no such bucket or container; create it first"):
        push(bundle, "s3://nosuch/ner")
    assert [each["Name"] for each in boto3.client("s3").list_buckets()["Buckets"]] == ["models"]
    with pytest.raises(BundleError, match=r"cannot be read .*; check the URL, or set AWS_PROFILE"):
        open_bundle("s3://No_Bucket!/ner")
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(Refused, match=r"may not be read .*; set AWS_PROFILE, or AWS_ACCESS_KEY_ID"):
        open_bundle(f"{bucket}/cities")
