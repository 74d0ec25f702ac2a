"""Bulk annotation from and to S3, as moto's server speaks it, which fails, stops and is slow. Needs s3fs and moto[server]."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lookup_bundles import city_table, write_bundle
from test_bulk import settings_of

from serve.errors import BadInput
from stillroom.verbs.annotate import run
from stillroom.verbs.annotate.parts import MANIFEST
from stillroom.verbs.annotate.run import annotate_files

s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
moto = pytest.importorskip("moto.server", reason="needs moto[server]")
boto3 = pytest.importorskip("boto3", reason="needs boto3, which moto brings")

pytestmark = pytest.mark.filterwarnings("ignore")  # of moto and of the libraries of Amazon

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
TEXTS = [f"{'please ' * (number % 5)}fly to rome" for number in range(60)]
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Faulty:
    """A WSGI application that answers with 503, or slowly, as `how` says."""

    def __init__(self, application: Application) -> None:
        self.application, self.how, self.puts = application, "", 0
        self.after_puts: Callable[[], None] = lambda: None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self.how == "503":
            start_response("503 Slow Down", [("Content-Type", "text/plain")])
            return [b"slow down"]
        if environ["REQUEST_METHOD"] == "PUT":
            self.puts += 1
            self.after_puts()
        answer = self.application(environ, start_response)
        return _slowly(answer) if self.how == "slow" else answer


def _slowly(answer: Iterable[bytes], bytes_per_s: int = 10_000) -> Iterator[bytes]:
    for piece in answer:
        for begin in range(0, len(piece), 1000):
            time.sleep(1000 / bytes_per_s)
            yield piece[begin : begin + 1000]


class Server:
    """An S3 on loopback that can be stopped and started again at its port."""

    def __init__(self) -> None:
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel("ERROR")
        self.application = Faulty(moto.DomainDispatcherApplication(moto.create_backend_app))
        self._make, self.port = make_server, 0
        self.start()

    def start(self) -> None:
        self._server = self._make("127.0.0.1", self.port, self.application, threaded=True)
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "cities", city_table())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with the bucket `texts`, which has three files, and keys for it in the environment, which workers inherit."""
    running = Server()
    settings = dict.fromkeys(KEYS, "test") | {
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{running.port}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="texts")
    for number in range(3):
        body = "".join(json.dumps({"id": place, "text": text}) + "\n" for place, text in enumerate(TEXTS))
        client.put_object(Bucket="texts", Key=f"in/{number}.jsonl", Body=body.encode())
    yield running
    s3fs.S3FileSystem.clear_instance_cache()
    running.application.how = ""
    client.delete_objects(Bucket="texts", Delete={"Objects": [{"Key": key} for key in objects()]})
    client.delete_bucket(Bucket="texts")
    running.stop()


def objects(prefix: str = "") -> dict[str, bytes]:
    client = boto3.client("s3")
    found = client.list_objects_v2(Bucket="texts", Prefix=prefix).get("Contents", [])
    return {each["Key"]: client.get_object(Bucket="texts", Key=each["Key"])["Body"].read() for each in found}


def parts(prefix: str = "out/") -> dict[str, bytes]:
    return {key.removeprefix(prefix): content for key, content in objects(prefix).items() if not key.endswith(MANIFEST)}


def undisturbed(bundle: Path, tmp_path: Path) -> dict[str, bytes]:
    (tmp_path / "in").mkdir()
    for key, content in objects("in/").items():
        (tmp_path / key).write_bytes(content)
    annotate_files(settings_of(bundle, tmp_path / "in", tmp_path / "whole", part_rows=10))
    return {each.name: each.read_bytes() for each in (tmp_path / "whole").glob("*.jsonl")}


def answered(bundle: Path, given: str = "s3://texts/in", out: str = "s3://texts/out", **more: Any) -> dict[str, Any]:
    return annotate_files(settings_of(bundle, given, out, **({"part_rows": 10} | more)))


def test_the_parts_in_a_bucket_are_those_on_a_disk(server: Server, bundle: Path, tmp_path: Path) -> None:
    document = answered(bundle, "s3://texts/in/*.jsonl")
    assert (document["output"], document["files"], document["rows"]) == ("s3://texts/out", 3, 180)
    assert parts() == undisturbed(bundle, tmp_path)
    assert json.loads(objects()[f"out/{MANIFEST}"])["complete"]
    assert answered(bundle, "s3://texts/in/*.jsonl")["texts_per_s"] is None


def test_a_store_that_stops_leaves_whole_parts_and_a_rerun_finishes(
    server: Server, bundle: Path, tmp_path: Path
) -> None:
    whole, application = undisturbed(bundle, tmp_path), server.application

    def stop_at_the_eighth() -> None:
        if application.puts == 8:
            threading.Thread(target=server.stop).start()

    application.after_puts = stop_at_the_eighth
    with pytest.raises(
        BadInput, match=r"cannot be (read|written) (?s:.*) parts are in s3://texts/out. Give the same command again"
    ):
        answered(bundle)
    application.after_puts = lambda: None
    server.start()
    there = parts()
    assert 0 < len(there) < len(whole)
    assert there.items() <= whole.items()
    document = answered(bundle)
    assert document["parts_before"] == len(there)
    assert parts() == whole


def test_503_is_tried_again_and_told(server: Server, bundle: Path, tmp_path: Path) -> None:
    server.application.how = "503"
    with pytest.raises(BadInput, match=r"s3://texts/.* cannot be read .*; give the same command again"):
        answered(bundle)
    server.application.how = ""
    assert parts() == {}
    whole = undisturbed(bundle, tmp_path)

    def fail_for_a_second() -> None:
        if server.application.puts == 5:
            server.application.how = "503"
            threading.Timer(1.0, setattr, (server.application, "how", "")).start()

    server.application.after_puts = fail_for_a_second
    answered(bundle)
    assert parts() == whole


def test_a_slow_store_is_waited_for(server: Server, bundle: Path, tmp_path: Path) -> None:
    whole = undisturbed(bundle, tmp_path)
    server.application.how = "slow"
    answered(bundle)
    server.application.how = ""
    assert parts() == whole


def test_missing_files_buckets_and_keys_of_a_store_are_named(
    server: Server, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, told in (
        ("s3://texts/none", "no file is there"),
        ("s3://nosuch/in", "no file is there"),
        ("s3://texts/in/*.csv", "no file is there"),
    ):
        with pytest.raises(BadInput, match=told):
            answered(bundle, given)
    with pytest.raises(
        BadInput, match=r"s3://nosuch/out cannot be written: there is no such bucket or container; create it first"
    ):
        answered(bundle, out="s3://nosuch/out")
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(BadInput, match=r"s3://texts/in.* may not be read .*; set AWS_PROFILE, or AWS_ACCESS_KEY_ID"):
        answered(bundle)
    for name in KEYS:
        monkeypatch.setenv(name, "test")


def put(key: str, rows: int) -> None:
    boto3.client("s3").put_object(Bucket="texts", Key=key, Body=b'{"text": "fly to rome"}\n' * rows)


def test_empty_objects_that_stand_for_folders_are_no_inputs(server: Server, bundle: Path) -> None:
    for key in ("marked/", "marked/deep/", "out/"):
        put(key, 0)
    put("marked/deep/a.jsonl", 2)
    assert answered(bundle, "s3://texts/marked")["rows"] == 2
    assert answered(bundle, "s3://texts/marked/**")["parts_before"] == 1


def test_a_name_with_a_bracket_and_names_that_differ_in_slashes(server: Server, bundle: Path) -> None:
    put("a[1].jsonl", 2)
    assert answered(bundle, "s3://texts/a[1].jsonl")["rows"] == 2
    put("in//0.jsonl", 1)
    with pytest.raises(
        BadInput, match=r"would have the same names: s3://texts/in//0.jsonl, s3://texts/in/0.jsonl; rename"
    ):
        answered(bundle, out="s3://texts/other")
    with pytest.raises(BadInput, match="is in the input folder"):
        answered(bundle, out="s3://texts/in/out")


def test_two_runs_with_other_settings_do_not_share_an_output(
    server: Server, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = run._plan

    def plan_late(*given: Any) -> None:
        monkeypatch.setattr(run, "_plan", plan)
        answered(bundle, answer_field="other")  # begins later, and is ahead
        plan(*given)

    monkeypatch.setattr(run, "_plan", plan_late)
    with pytest.raises(
        BadInput, match=r"s3://texts/out was begun by another run meanwhile, with field \"other\", now \"answer\""
    ):
        answered(bundle)
    assert {key for key, content in parts().items() if b'"other":' not in content} == set()
    assert answered(bundle, answer_field="other")["texts_per_s"] is None
