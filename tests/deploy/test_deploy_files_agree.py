"""What stands in `deploy/` is true of the program, and its files agree with each other."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_files import (
    DEPLOY,
    KUBERNETES,
    ROOT,
    container,
    dockerfile,
    image_health_check,
    read,
    server_commands,
    unit,
)
from server_process import serving, until

from serve.http.app import create_app
from serve.http.connections.server import CUT_OFF_S, LEAVE_S
from serve.observe.metrics import Metrics
from serve.settings import Limits, ServeSettings

CONTAINERS = ["kubernetes/deployment.yaml", "kserve/serving-runtime.yaml"]


def given(command: list[str]) -> dict[str, object]:
    """What the command line takes `command` for; it exits when there is no such option."""
    group = __import__("stillroom.cli.main", fromlist=["app"]).app
    assert command[0] == "stillroom"
    verb = group.commands[command[1]]  # type: ignore[attr-defined]
    return dict(verb.make_context(command[1], command[2:]).params)


def stopping_s(place: str) -> float:
    """From SIGTERM to the end at the latest: the requests that still come, the answers under way, then the processes."""
    lingers = given(server_commands()[place])["linger_s"]
    linger_s = ServeSettings.linger_s if lingers is None else float(str(lingers))
    return linger_s + ServeSettings.drain_s + CUT_OFF_S + LEAVE_S


@pytest.fixture(scope="module")
def paths(served_bundle: Path) -> set[str]:
    return {route.path for route in create_app([served_bundle]).routes}  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", list(server_commands()))
def test_every_command_that_runs_the_server_is_one_that_it_takes(place: str) -> None:
    taken = given(server_commands()[place])
    assert taken["bundles"]
    # In a container the loopback is the container's own; on a host nobody else is let in.
    assert taken["host"] == ("127.0.0.1" if place == "stillroom.service" else "0.0.0.0")  # noqa: S104


@pytest.mark.parametrize("place", CONTAINERS)
@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_a_probe_asks_an_endpoint_on_the_port_that_listens(place: str, probe: str, paths: set[str]) -> None:
    pod = container(place)
    asked = pod[probe]["httpGet"]
    assert asked["path"] == ("/healthz" if probe == "livenessProbe" else "/readyz")
    assert asked["path"] in paths
    (port,) = pod["ports"]
    assert asked["port"] in (port.get("name"), port["containerPort"])
    assert port["containerPort"] == given(server_commands()[place])["port"]


def test_compose_repeats_the_health_check_of_the_image() -> None:
    """Builders of OCI images drop the image's own."""
    assert int(dockerfile()["EXPOSE"][0]) == given(server_commands()["Dockerfile"])["port"]
    assert read("compose.yaml")["services"]["stillroom"]["healthcheck"]["test"] == ["CMD", *image_health_check()]


@pytest.mark.parametrize("options", [[], ["--tls-cert"], ["--tls-cert", "--tls-client-ca"]], ids="-".join)
def test_the_health_check_finds_the_server_of_its_container_with_any_port_and_tls(
    served_bundle: Path, options: list[str], tmp_path: Path
) -> None:
    pem = tmp_path / "server.pem"
    if options:
        openssl = shutil.which("openssl") or pytest.skip("makes its certificate with openssl")
        make = [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=elsewhere",
            "-keyout",
            pem,
            "-out",
        ]
        subprocess.run([*make, tmp_path / "chain.pem"], check=True, capture_output=True)
        pem.write_bytes(pem.read_bytes() + (tmp_path / "chain.pem").read_bytes())
    tls = [str(part) for option in options for part in (option, pem)]
    with serving(served_bundle, *tls, said="https://" if tls else "http://", ready=False) as running:
        command = tmp_path / "cmdline"  # as Linux shows that of a process

        def healthy(port: str) -> bool:
            with_init = ["/sbin/docker-init", "--", "stillroom", "serve", *tls, "--port", port, ""]
            command.write_text("\0".join(with_init), encoding="utf-8")
            return subprocess.run([sys.executable, *image_health_check()[1:], command], check=False).returncode == 0

        until(lambda: healthy(running.url.rpartition(":")[2]))
        assert not healthy("1")


def test_the_alarms_of_the_page_are_those_of_the_file() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^### Alarms\n.*?\n\|---.*?\n(.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    (refused,) = re.findall(r"^# Share of requests refused.*?\n(.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    shown = []
    for line in table.splitlines():
        condition, lasts, _ = (cell.strip() for cell in line.strip("|").split("|"))
        expression = re.match(r"`(.*?)`", condition)
        assert expression or "share of requests refused" in condition
        shown.append(
            (
                expression[1] if expression else f"{refused} > 0.01",
                lasts.removesuffix("minutes").removesuffix("minute").strip(),
            )
        )
    (group,) = read("monitoring/alarms.yml")["groups"]
    rules = [(rule["expr"], rule.get("for", "").removesuffix("m")) for rule in group["rules"]]
    assert [("".join(expression.split()), lasts) for expression, lasts in shown] == [
        ("".join(expression.split()), lasts) for expression, lasts in rules
    ]
    assert all(rule["annotations"]["summary"] for rule in group["rules"])
    assert read("prometheus.yml")["rule_files"] == ["monitoring/alarms.yml"]


def test_kustomize_makes_what_the_files_say_and_the_variant_takes_a_bundle_from_a_url() -> None:
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("there is no kubectl")

    def made(folder: str) -> dict[str, Any]:
        text = subprocess.run([kubectl, "kustomize", DEPLOY / folder], capture_output=True, check=True).stdout
        return {each["kind"]: each for each in yaml.safe_load_all(text)}

    plain, remote = made("kubernetes"), made("remote-bundle")
    assert plain == {each["kind"]: each for each in map(yaml.safe_load, (file.read_text() for file in KUBERNETES))}
    pod = remote["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    entry = server_commands()["Dockerfile"][:-1]
    (bundle,) = given(entry + server["args"])["bundles"]  # type: ignore[misc]
    assert str(bundle).startswith("https://")
    (mount,), (volume,) = server["volumeMounts"], pod["volumes"]
    assert (mount["name"], {"name": "STILLROOM_CACHE", "value": mount["mountPath"]}) == (
        volume["name"],
        server["env"][0],
    )
    assert remote["NetworkPolicy"]["spec"]["egress"]


def test_the_pod_monitor_scrapes_the_pods(paths: set[str]) -> None:
    monitor, pod = read("monitoring/pod-monitor.yaml")["spec"], read("kubernetes/deployment.yaml")["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["path"] in paths
    assert endpoint["port"] in [port["name"] for port in container("kubernetes/deployment.yaml")["ports"]]
    # Alarms ask for this job.
    assert pod["metadata"]["labels"][monitor["jobLabel"]] == "stillroom"


def test_what_is_published_scraped_and_let_in_is_the_port_that_listens(paths: set[str]) -> None:
    port = given(server_commands()["Dockerfile"])["port"]
    assert read("compose.yaml")["services"]["stillroom"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (job,) = read("prometheus.yml")["scrape_configs"]
    assert job["metrics_path"] in paths
    assert job["static_configs"] == [{"targets": [f"stillroom:{port}"]}]
    named = {each["name"]: each["containerPort"] for each in container("kubernetes/deployment.yaml")["ports"]}
    assert named[read("kubernetes/service.yaml")["spec"]["ports"][0]["targetPort"]] == port
    assert named[read("kubernetes/network-policy.yaml")["spec"]["ingress"][0]["ports"][0]["port"]] == port
    annotations = read("kubernetes/deployment.yaml")["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == port
    assert annotations["prometheus.io/path"] in paths
    annotations = read("kserve/serving-runtime.yaml")["spec"]["annotations"]
    assert int(annotations["prometheus.kserve.io/port"]) == given(server_commands()[CONTAINERS[1]])["port"]
    assert annotations["prometheus.kserve.io/path"] in paths


def test_every_selector_finds_the_pods() -> None:
    deployment = read("kubernetes/deployment.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
        read("kubernetes/service.yaml")["spec"]["selector"],
        read("kubernetes/disruption-budget.yaml")["spec"]["selector"]["matchLabels"],
        read("kubernetes/network-policy.yaml")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector
        assert selector.items() <= labels
    assert "replicas" not in deployment["spec"]


def test_whoever_stops_the_server_waits_until_it_has_drained() -> None:
    assert int(unit()["TimeoutStopSec"][0]) > stopping_s("stillroom.service")
    compose_s = int(read("compose.yaml")["services"]["stillroom"]["stop_grace_period"].removesuffix("s"))
    assert compose_s > stopping_s("compose.yaml")
    place = "kubernetes/deployment.yaml"
    assert read(place)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > stopping_s(place)


def test_systemd_starts_the_server_again_after_an_end_that_it_would_call_clean() -> None:
    (restart,), (signals,) = unit()["Restart"], unit()["RestartForceExitStatus"]
    assert restart == "on-failure"
    assert {"SIGHUP", "SIGPIPE"} <= set(signals.split())


def test_a_pod_that_is_told_to_end_answers_until_nobody_sends_to_it() -> None:
    assert float(str(given(server_commands()["kubernetes/deployment.yaml"])["linger_s"])) >= 5
    rolling = read("kubernetes/deployment.yaml")["spec"]["strategy"]["rollingUpdate"]
    assert (rolling["maxUnavailable"], rolling["maxSurge"]) == (0, 1)


SCALERS = ["kubernetes/autoscaler.yaml", "autoscaling/pods-metric.yaml", "autoscaling/keda.yaml"]


@pytest.mark.parametrize("place", SCALERS)
def test_every_scaler_is_of_the_deployment_and_keeps_a_pod_for_the_budget(place: str) -> None:
    scaled, deployment = read(place)["spec"], read("kubernetes/deployment.yaml")
    target = scaled["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (deployment["apiVersion"], deployment["kind"])
    assert target["name"] == deployment["metadata"]["name"]
    fewest = scaled.get("minReplicas") or scaled["minReplicaCount"]
    # Otherwise the budget would let the only pod go, or none.
    assert fewest > read("kubernetes/disruption-budget.yaml")["spec"]["maxUnavailable"]


def test_the_scalers_ask_for_metrics_that_the_server_has() -> None:
    _, trigger = read("autoscaling/keda.yaml")["spec"]["triggers"]
    (rule,) = read("autoscaling/adapter-rules.yaml")["rules"]["custom"]
    series = {
        name
        for text in (trigger["metadata"]["query"], rule["seriesQuery"], rule["metricsQuery"])
        for name in re.findall(r"stillroom_\w+", text)
    }
    metrics = Metrics()
    metrics.queue_seconds.labels("any").observe(0.0)
    assert series
    assert all(re.search(rf"^{name}{{", metrics.text().decode(), re.MULTILINE) for name in series)
    # The name that the rule gives is the one that the autoscaler asks for.
    _, pods = read("autoscaling/pods-metric.yaml")["spec"]["metrics"]
    assert pods["pods"]["metric"]["name"] == rule["name"]["as"]
    # Pods are added well before the server refuses requests.
    assert float(trigger["metadata"]["threshold"]) < Limits.queue_s / 2


def test_the_server_runs_under_one_number_that_is_not_root_and_may_write_nothing() -> None:
    user, group = map(int, dockerfile()["USER"][0].split(":"))
    assert user > 0
    pod = read("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (user, group)
    assert container("kserve/serving-runtime.yaml")["securityContext"]["runAsUser"] == user
    for place in CONTAINERS:
        context = container(place)["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
    for service in read("compose.yaml")["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_images_are_named_by_version() -> None:
    ours = f"stillroom:{project()['version']}"
    services = read("compose.yaml")["services"]
    assert {services["stillroom"]["image"], *(container(place)["image"] for place in CONTAINERS)} == {ours}
    dockerfile_text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    others = [services["prometheus"]["image"], *re.findall(r"^ARG PYTHON_IMAGE=(\S+)", dockerfile_text, re.MULTILINE)]
    assert len(others) == 2
    for image in others:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_the_image_is_built_from_the_packages_of_the_wheel_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    packages = {
        pattern.removesuffix("*") for pattern in settings()["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert kept == packages | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert all((ROOT / name).exists() for name in kept)


def test_the_wheel_holds_every_file_of_the_packages_that_is_no_python() -> None:
    setuptools = settings()["tool"]["setuptools"]
    packages = [ROOT / pattern.removesuffix("*") for pattern in setuptools["packages"]["find"]["include"]]
    files = {
        path
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    held: set[Path] = set()
    for name, patterns in setuptools["package-data"].items():
        folders = [file.parent for package in packages for file in package.rglob("__init__.py")]
        if name != "*":
            folders = [ROOT.joinpath(*name.split("."))]
        held |= {path for folder in folders for pattern in patterns for path in folder.glob(pattern)}
    assert files <= held
    assert ROOT / "stillroom" / "inputs" / "sample_texts" / "phrases.toml" in files


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return dict(settings()["project"])
