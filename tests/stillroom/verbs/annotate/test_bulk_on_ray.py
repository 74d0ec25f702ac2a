"""`stillroom annotate --ray`, on one cluster of this machine for all tests here."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import Any

import psutil
import pytest
from lookup_bundles import city_table, write_bundle
from patience import PATIENCE_S
from processes import started
from repository import ROOT
from test_bulk import digests, job_of, parts_of, settings_of, write_inputs

from serve.bundle import fetched
from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle
from stillroom.verbs.annotate import on_ray
from stillroom.verbs.annotate.annotator import Ready, versions
from stillroom.verbs.annotate.parts import MANIFEST
from stillroom.verbs.annotate.run import annotate_files
from stillroom.verbs.annotate.workers import WorkerGroup

# Read when Ray is loaded: it sends nothing home.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason="needs Ray")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Ray
    pytest.mark.timeout(900),
]

CLUSTER = """
import sys, ray
cluster = ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
                   logging_level="ERROR", object_store_memory=100 * 2**20)
print(cluster.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster, whose processes keep bundles in a cache of their own."""
    cache = str(tmp_path_factory.mktemp("cache"))
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "STILLROOM_CACHE": cache,
        # As on these systems, Ray stays on loopback. This process may have loaded it already, so its constant is set.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "disabled",  # a token would be kept in the home folder
    }
    patched = pytest.MonkeyPatch()
    patched.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
    command = [sys.executable, "-c", CLUSTER]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=PATIENCE_S)
    patched.undo()


@pytest.mark.slow
def test_the_parts_are_those_of_one_machine_though_an_actor_is_killed(slow: Path, cluster: str, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in")
    (tmp_path / "in" / "many.txt").write_text(("fly to rome please " * 8 + "\n") * 600)
    annotate_files(settings_of(slow, tmp_path / "in", tmp_path / "local", part_rows=20))
    out, killed = tmp_path / "out", []

    def kill_an_actor() -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and len(parts_of(out, "many.txt")) < 3:
            time.sleep(0.01)
        found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        for line in found.splitlines():
            pid, name = line.split(maxsplit=1)
            if name.startswith("ray::_Actor.call") and str(out) in _open_files(int(pid)):
                os.kill(int(pid), signal.SIGKILL)
                killed.append(int(pid))
                return

    killing = threading.Thread(target=kill_an_actor)
    killing.start()
    document = annotate_files(settings_of(slow, tmp_path / "in", out, part_rows=20, processes=2, ray=cluster))
    killing.join()
    assert killed
    assert (document["ray"], document["processes"], document["rows"]) == (cluster, 2, 830)
    assert digests(out) == digests(tmp_path / "local")
    manifest = json.loads((out / MANIFEST).read_bytes())
    assert manifest["complete"]
    assert {name: part["sha256"] for name, part in manifest["parts"].items()} == digests(out)


def _open_files(pid: int) -> str:
    """The files that a process has open, so that no other test's actor is killed."""
    try:
        return " ".join(os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return ""


def test_bad_rows_and_a_failing_model_are_told_with_node_and_row(cities: Path, cluster: str, tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text('{"text": "fly"}\nnope\n')
    with pytest.raises(BadInput, match=r"in.jsonl, line 2: is not JSON"):
        annotate_files(settings_of(cities, given, tmp_path / "out", ray=cluster))
    assert not (tmp_path / "out").exists()
    given.write_text('{"text": "fly"}\n{"text": "it"}\n')
    with pytest.raises(Exception, match=r"node .*in.jsonl, line 2: (?s:.*)0 of 1 parts are in"):
        annotate_files(settings_of(cities, given, tmp_path / "out", ray=cluster))


def test_a_cluster_of_another_version_is_refused(cities: Path, cluster: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("fly\n")
    ray.init(address=cluster, log_to_driver=False)
    try:
        from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
        from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

        def say(version: bytes) -> None:
            _internal_kv_put(CLUSTER_METADATA_KEY, version, overwrite=True, namespace=KV_NAMESPACE_CLUSTER)

        told = _internal_kv_get(CLUSTER_METADATA_KEY, namespace=KV_NAMESPACE_CLUSTER)
        say(json.dumps(json.loads(told) | {"ray_version": "1.0.0"}).encode())
    finally:
        ray.shutdown()
    with pytest.raises(BadInput, match=r"cannot be used .*1\.0\.0.*; install the cluster's versions here"):
        annotate_files(settings_of(cities, tmp_path / "in.txt", tmp_path / "out", ray=cluster))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray, "__version__", "1.0.0")
        ray.init(address=cluster, log_to_driver=False)
        say(told)
        ray.shutdown()


def test_a_node_without_the_bundle_gets_it_through_the_object_store(
    cities: Path, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fetched.CACHE_VARIABLE, str(tmp_path / "cache"))
    digest = open_bundle(cities).manifest.digest
    here = job_of(cities, tmp_path)
    job = replace(here, bundle=str(tmp_path / "elsewhere"))
    write_bundle(tmp_path / "other", city_table() * 2)
    other = replace(here, bundle=str(tmp_path / "other"))
    ray.init(address=cluster, log_to_driver=False)
    try:
        with pytest.raises(BadInput, match="other was changed while it was used; give the same command again"):
            on_ray._files_of(other)
        files = ray.put(on_ray._files_of(replace(other, digest=open_bundle(other.bundle).manifest.digest)))
        with pytest.raises(BadInput, match="elsewhere was changed while it was used; give the same command again"):
            on_ray._bundle_here(job, files)
        assert not (tmp_path / "cache" / "bundles" / digest).exists()
        bundle = on_ray._bundle_here(job, ray.put(on_ray._files_of(here)))
        assert on_ray._bundle_here(job, None).path == bundle.path  # from the cache
    finally:
        ray.shutdown()
    assert bundle.path == tmp_path / "cache" / "bundles" / digest
    assert Pipeline(bundle.path)("fly to rome") == Pipeline(cities)("fly to rome")


def test_an_actor_that_ray_ends_is_replaced_and_a_bug_in_it_is_raised(
    cities: Path, cluster: str, tmp_path: Path
) -> None:
    job = job_of(cities, tmp_path)
    ray.init(address=cluster, log_to_driver=False)
    try:
        worker = on_ray.RayWorker(ray, job, ray.put({}))
        for error in (
            ray.exceptions.OutOfMemoryError("memory"),
            ray.exceptions.ActorUnschedulableError("no node"),
            ray.exceptions.NodeDiedError("a node"),
            ray.exceptions.ActorDiedError(),
        ):
            assert worker.died(error)
        with WorkerGroup([worker]) as group, pytest.raises(AttributeError, match="no attribute 'nosuch'"):
            list(group.results("nosuch", [1]))
    finally:
        ray.shutdown()


def test_a_node_of_other_versions_is_refused() -> None:
    on_ray.check_node(Ready(1, "here", versions()))
    with pytest.raises(BadInput, match=r"node there has pyarrow 1.0 instead of .*; install the same versions"):
        on_ray.check_node(Ready(1, "there", versions() | {"pyarrow": "1.0"}))


def test_a_cluster_that_cannot_do_the_work_is_refused_at_once(
    cities: Path, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_text("fly\n")

    def refused(**how: Any) -> str:
        with pytest.raises(BadInput) as told:
            annotate_files(settings_of(cities, tmp_path / "in.txt", tmp_path / "out", **how))
        assert not (tmp_path / "out").exists()
        return told.value.message

    assert "has 2 CPUs, and 3 x 1 are asked for" in refused(ray=cluster, processes=3)
    with closing(socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert f"--ray {address}: nothing answers there" in refused(ray=address)
    assert "give local, or the address of a cluster" in refused(ray="here")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert 'pip install "stillroom[ray]"' in refused(ray="local")


def test_a_local_cluster_is_on_loopback_and_ends_with_the_command(slow: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(("fly to rome please " * 8 + "\n") * 300)
    command = [sys.executable, "-m", "stillroom", "annotate", str(slow), "--ray", "local", "--json", "--processes", "1"]
    command += ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--part-rows", "20"]
    environment = os.environ | {"HOME": str(tmp_path)}  # where Ray keeps the token of the cluster
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as driver:
        while not list((tmp_path / "out").glob("*.jsonl")):
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.05)
        processes = psutil.Process(driver.pid).children(recursive=True)
        listening = {
            each.laddr.ip
            for process in processes
            for each in process.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }
        said, told = driver.communicate()
    assert listening
    assert {ip for ip in listening if not ip.removeprefix("::ffff:").startswith("127.") and ip != "::1"} == set()
    assert driver.returncode == 0, told
    assert json.loads(said)["rows"] == 300
    annotate_files(settings_of(slow, tmp_path / "in.txt", tmp_path / "alone", part_rows=20))
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")
    assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]
