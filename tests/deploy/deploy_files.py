"""The files of `deploy/` as data."""

import json
import re
import shlex
from typing import Any

import yaml
from repository import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = sorted(set((DEPLOY / "kubernetes").glob("*.yaml")) - {DEPLOY / "kubernetes" / "kustomization.yaml"})
KSERVE = sorted((DEPLOY / "kserve").glob("*.yaml"))


def read(name: str) -> Any:
    """A YAML file of `deploy/` that holds one document."""
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def dockerfile() -> dict[str, list[str]]:
    """What each instruction of the last stage says, in order."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    stage = re.split(r"^FROM ", text, flags=re.MULTILINE)[-1]
    said: dict[str, list[str]] = {}
    for line in stage.splitlines()[1:]:
        word, _, rest = line.partition(" ")
        if word.isupper():
            said.setdefault(word, []).append(rest)
    return said


def image_command() -> list[str]:
    """What a container runs when it is given no arguments."""
    said = dockerfile()
    return [*json.loads(said["ENTRYPOINT"][0]), *json.loads(said["CMD"][0])]


def image_health_check() -> list[str]:
    """The image's health check, its program first."""
    return list(json.loads(dockerfile()["HEALTHCHECK"][0].partition(" CMD ")[2]))


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit, each with its values in order."""
    said: dict[str, list[str]] = {}
    for line in (DEPLOY / "stillroom.service").read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            said.setdefault(name, []).append(value)
    return said


def container(name: str) -> dict[str, Any]:
    """The one container of the Deployment, or of KServe's runtime."""
    spec = read(name)["spec"]
    (found,) = spec.get("template", {"spec": spec})["spec"]["containers"]
    return dict(found)


def server_commands() -> dict[str, list[str]]:
    """Every command that runs the server, by where it stands: `stillroom serve ...`."""
    entry_point = json.loads(dockerfile()["ENTRYPOINT"][0])
    runtime = container("kserve/serving-runtime.yaml")
    return {
        "Dockerfile": image_command(),
        "compose.yaml": entry_point + read("compose.yaml")["services"]["stillroom"]["command"],
        "stillroom.service": ["stillroom", *shlex.split(unit()["ExecStart"][0])[1:]],
        "kubernetes/deployment.yaml": entry_point + container("kubernetes/deployment.yaml")["args"],
        "kserve/serving-runtime.yaml": runtime["command"] + runtime["args"],
    }
