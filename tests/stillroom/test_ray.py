"""`stillroom.ray`: the answers of `stillroom serve` from Ray Serve, in a cluster of one machine, and what it refuses before."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from patience import PATIENCE_S
from repository import ROOT
from server_process import serving, until
from starlette.testclient import TestClient

from benchmarks.serve.on_ray import ray_serving
from serve.errors import BadInput, BundleError
from serve.http.app import create_app
from serve.settings import ServeSettings
from serve.tasks import open_bundle
from stillroom.ray import app_builder, application

# The modules of Ray Serve warn at their import about how they use pydantic.
pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on .Field.:DeprecationWarning")

JSON = {"Content-Type": "application/json"}
TEXTS = ["fly to rome", "i love oslo 🙏", "", "new york please " * 20]
CALLS = [
    ("/v1/entities", {"text": TEXTS}),
    ("/v1/entities", {"text": "fly to münchen", "offsets": "utf16", "min_score": 0.5}),
    ("/v1/classify", {"text": TEXTS, "top_k": 2}),
    ("/v1/classify", {"text": "refund", "model": "prod"}),
    ("/v2/models/cities/infer", {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["rome"]}]}),
    ("/v1/classify", {"txt": "refund"}),
    ("/v1/classify", {"text": "refund", "model": "none"}),
    ("/v1/score", {"text": "refund"}),
    ("/v1/nothing", {}),
    ("/v1/classify", b'{"text": '),
    ("/v1/classify", {"text": "a" * 100_001}),
]


@pytest.fixture(scope="module")
def bundles(plain: Path, intents: Path) -> list[Path]:
    return [plain, intents]


@pytest.fixture(scope="module")
def on_ray(bundles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    arguments = ["bundle=" + ",".join(map(str, bundles)), "replicas=2", "alias=prod=intents"]
    with (tmp_path_factory.mktemp("ray") / "log").open("w+") as log:
        try:
            with ray_serving(*arguments, prefix="/texts", log=log) as served:
                yield served
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(log.read()[-5000:]) from error


def test_the_app_of_a_replica_answers_as_that_of_the_server(bundles: list[Path]) -> None:
    settings = ServeSettings(alias=("prod=intents",), threads=1)
    digests = {bundle.name: open_bundle(bundle).manifest.digest for bundle in bundles}
    places = list(map(str, bundles))
    own = app_builder(places, settings, digests, needs_keys=False)()
    with TestClient(own, root_path="/texts") as replica, TestClient(create_app(places, settings)) as server:
        for path, asked in CALLS:
            body = asked if isinstance(asked, bytes) else json.dumps(asked)
            expected = server.post(path, content=body, headers=JSON)
            answered = replica.post(f"/texts{path}", content=body, headers=JSON)
            assert (answered.status_code, answered.content) == (expected.status_code, expected.content), path


def replicas(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if "ServeReplica" in " ".join(each.cmdline())]


@pytest.mark.slow
def test_the_bytes_of_every_answer_are_those_of_the_server(
    on_ray: tuple[str, psutil.Process], bundles: list[Path]
) -> None:
    ray_url, _ = on_ray
    with (
        serving(*bundles, "--alias", "prod=intents") as server,
        httpx.Client(timeout=PATIENCE_S, headers=JSON) as client,
    ):
        for path, asked in CALLS:
            body = asked if isinstance(asked, bytes) else json.dumps(asked)
            expected, answered = (client.post(where + path, content=body) for where in (server.url, ray_url))
            assert (answered.status_code, answered.content) == (expected.status_code, expected.content), path
            assert answered.headers["content-type"] == expected.headers["content-type"]
        for path in ("", "/v1/models", "/openapi.json", "/v2/models/cities", "/readyz"):
            expected, answered = (client.get(where + path) for where in (server.url, ray_url))
            assert (answered.status_code, answered.content) == (expected.status_code, expected.content), path


@pytest.mark.slow
def test_a_replica_that_dies_is_replaced(on_ray: tuple[str, psutil.Process]) -> None:
    url, process = on_ray
    before = replicas(process)
    assert len(before) == 2
    before[0].kill()
    answers: list[int] = []

    def all_answer() -> bool:
        answers.append(httpx.post(f"{url}/v1/classify", json={"text": "refund"}, timeout=PATIENCE_S).status_code)
        return answers[-20:] == [200] * 20 and len(set(replicas(process)) - set(before)) == 1

    until(all_answer)


def test_serve_run_says_in_one_message_what_is_wrong(tmp_path: Path) -> None:
    arguments = [f"bundle={tmp_path / 'none'},{tmp_path / 'nor'}", "replicas=1"]
    program = shutil.which("serve", path=str(Path(sys.executable).parent))
    assert program
    command = [program, "run", "stillroom.ray:application", *arguments]
    said = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, check=False
    )
    assert said.returncode == 1
    assert "Traceback" not in said.stdout
    message = said.stdout[said.stdout.index("Error: ") :]
    assert message.startswith("Error: 2 faults were found")
    assert "none does not exist; give a bundle" in message
    assert "nor does not exist" in message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--bundle is needed"),
        ({"bundle": "b", "replica": "2"}, r"replica is not a setting \(did you mean replicas\?\)"),
        ({"bundle": "b", "replicas": "two"}, "--replicas is 'two'"),
        ({"bundle": "b", "replicas": 3, "max_replicas": 2}, "max_replicas is 2, and replicas, the fewest, is 3"),
        ({"bundle": "b", "port": "80", "tls_cert": "c"}, r"port is of `stillroom serve`.*\n.*tls_cert is of"),
        ({"bundle": "b", "variant": "int9"}, "give one of fp32, fp16, int8"),
        ({"bundle": "b", "open_metrics": "perhaps"}, "--open-metrics is 'perhaps'"),
        # What every replica would refuse.
        ({"variant": "int8"}, "'cities' has no variant 'int8'"),
        ({"alias": "prod=nobody"}, "alias 'prod' for 'nobody'"),
    ],
)
def test_settings_that_cannot_be_used_are_named(bundles: list[Path], given: dict[str, object], message: str) -> None:
    of_a_replica = {"variant", "alias"} & set(given) and "bundle" not in given
    known = {"bundle": ",".join(map(str, bundles))} if of_a_replica else {}
    with pytest.raises(BadInput, match=message):
        application(known | given)


def test_all_faults_are_told_at_once(bundles: list[Path], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(bundles[0], tmp_path / "broken"))
    (broken / "onnx" / "model.onnx").write_bytes(b"other")
    (tmp_path / "keys").write_text("short:key\n", encoding="utf-8")
    with pytest.raises(BadInput) as raised:
        application({"bundle": [str(broken)], "keys": str(tmp_path / "keys"), "alias": "prod"})
    assert "3 faults" in raised.value.message
    for part in ("onnx/model.onnx", "--alias is 'prod'", "keys, line 1"):
        assert part in raised.value.message


def test_a_replica_refuses_a_bundle_that_was_changed_and_does_not_start_without_the_keys(
    bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STILLROOM_KEYS", raising=False)
    given = ([str(bundles[0])], ServeSettings(processes=1))
    with pytest.raises(BundleError, match="'cities' is not the one with which the application was started"):
        app_builder(*given, {"cities": "other"}, needs_keys=False)()
    with pytest.raises(BadInput, match="STILLROOM_KEYS is set where the application was started"):
        app_builder(*given, {}, needs_keys=True)()


def test_the_number_of_replicas_is_fixed_or_has_bounds(bundles: list[Path]) -> None:
    given = {"bundle": str(bundles[0])}
    assert application(given | {"replicas": "3"})._bound_deployment.num_replicas == 3
    bounds = {"replicas": "2", "max_replicas": "5", "target_ongoing_requests": "4"}
    config = application(given | bounds)._bound_deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (2, 5, 4.0)


def test_without_ray_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from stillroom.ray import application\n"
        "assert 'torch' not in sys.modules\n"
        "from serve.errors import BadInput\n"
        "try:\n    application({'bundle': 'b'})\n"
        "except BadInput as error:\n    print(error.message)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 'Run: pip install "stillroom[ray]"' in said.stdout
