"""Compare stillroom's server with its peers, in turns: the same int8 graph, texts, client and cores.

    python benchmarks/serve/peers/make_environments.py FOLDER
    python benchmarks/serve/against_peers.py BUNDLE TEXTS --environments FOLDER [--peers ours,mosec,...] [--rounds 3] [--seconds 5]
        [--bound-ms 50] [--json F]

BUNDLE is of a text classifier. In each round each server is started, in random order, and gets two sets of texts: those of TEXTS, and
joined ones of 1 to 200 tokens, uniform in the logarithm of their length. Each request has one text; connections stay open. The
measurements are

  low     one connection, one text after another: p50 and p99
  peak    a closed loop of 32 connections: answers a second, and the p99 it comes at
  bound   the highest rate of an open loop (a Poisson process, latency from the due moment) whose p99 stays under `--bound-ms` with nothing
          refused or failed: the search of `latency.load.generator.ramp`

Labels are compared with those of `Pipeline`, and differences are counted. The environment variable MAX_BATCH (32) is the largest batch
of mosec, LitServe and BentoML; FAST_QUEUE=1 gives LitServe its ZeroMQ queue. Choose the values that are fastest on this machine.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from running import START_S, Place, drive, post, serving, stop

from compress.data.texts import read_texts
from latency.load.driver import Driven
from latency.load.generator import ramp, request_bodies
from latency.measure.machine import machine_facts
from latency.measure.statistics import paired_ratio
from serve.errors import BadInput
from serve.http.connections.sockets import listening
from serve.model.pipeline import Pipeline

HERE = Path(__file__).with_name("peers")
MIXED_TEXTS = 700
MIXED_TOKENS = 200  # of the longest
CONNECTIONS = 32
WARM_REQUESTS = 200


@dataclass(frozen=True)
class Peer:
    """How to start a server and send requests to it. In `command`, BIN is its environment's `bin` folder and PORT its port. With
    `in_model` it runs in the model's folder, where infinity finds a local ONNX file.
    """

    command: tuple[str, ...]
    path: str
    template: str
    label: Callable[[Any], str]
    environment: str = ""
    in_model: bool = False


INFINITY = (
    "BIN/infinity_emb v2 --model-id . --served-model-name student --device cpu --host 127.0.0.1 --port PORT --log-level warning "
    # Its warm-up sends texts of more than 512 tokens, which its optimum engine does not truncate.
    "--no-model-warmup --no-bettertransformer --engine"
)
PEERS = {
    "ours": Peer((), "/v1/classify", '{"text": "TEXT", "top_k": 1}', lambda said: said["results"][0]["labels"][0]["label"]),
    "fastapi": Peer(("BIN/python", "fastapi_server.py", "PORT"), "/classify", '{"text": "TEXT"}', lambda said: said["label"]),
    "litserve": Peer(("BIN/python", "litserve_server.py", "PORT"), "/predict", '{"text": "TEXT"}', lambda said: said["label"]),
    "mosec": Peer(
        ("BIN/python", "mosec_server.py", "--address", "127.0.0.1", "--port", "PORT", "--log-level", "warning"),
        "/inference", '{"text": "TEXT"}', lambda said: said["label"],
    ),
    "bentoml": Peer(
        ("BIN/bentoml", "serve", "bentoml_server:Classify", "--host", "127.0.0.1", "--port", "PORT"),
        "/classify", '{"texts": ["TEXT"]}', lambda said: said[0]["label"],
    ),
    "infinity": Peer(
        (*INFINITY.split(), "optimum", "--onnx-disable-optimize"), "/classify", '{"model": "student", "input": ["TEXT"]}',
        lambda said: max(said["data"][0], key=lambda each: each["score"])["label"], "infinity", True,
    ),
    # The same model in float32, since the torch engine batches and the optimum engine does not.
    "infinity-torch": Peer(
        (*INFINITY.split(), "torch"), "/classify", '{"model": "student", "input": ["TEXT"]}',
        lambda said: max(said["data"][0], key=lambda each: each["score"])["label"], "infinity", True,
    ),
}  # fmt: skip


def model_folders(bundle: Path, folder: Path) -> tuple[Path, Path]:
    """The bundle as a transformers folder with `onnx/`, and one with the ONNX file beside the rest; some servers write there."""
    nested, flat = folder / "nested", folder / "flat"
    for made, graph in ((nested, nested / "onnx"), (flat, flat)):
        graph.mkdir(parents=True)
        for name in (
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "model.safetensors",
        ):
            shutil.copy(bundle / name, made)
        shutil.copy(bundle / "onnx" / "model_quantized.onnx", graph)
    return nested, flat


@contextlib.contextmanager
def running(name: str, given: argparse.Namespace, folders: tuple[Path, Path], log: Path) -> Iterator[Place]:
    """Starts the server called `name`; yields its address once it answers."""
    bundle, environments = given.bundle, given.environments
    if name == "ours":
        with serving([bundle], *given.options.split(), log=log) as server:
            yield server.place
        return
    peer = PEERS[name]
    with listening("127.0.0.1", 0) as free:
        place = Place(*free.getsockname())
    bin_folder = environments.resolve() / (peer.environment or name) / "bin"
    command = [part.replace("BIN", str(bin_folder)).replace("PORT", str(place.port)) for part in peer.command]
    environment = {
        **os.environ, "MODEL": str(folders[0]), "PYTHONPATH": "", "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "BENTOML_DO_NOT_TRACK": "True", "TOKENIZERS_PARALLELISM": "false",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    }  # fmt: skip
    with (
        log.open("ab") as said,
        subprocess.Popen(
            command, cwd=folders[1] if peer.in_model else HERE, env=environment, stdout=said, stderr=said
        ) as process,
    ):
        try:
            wait_for_an_answer(place, peer, process)
            yield place
        finally:
            stop(process)


def wait_for_an_answer(place: Place, peer: Peer, process: subprocess.Popen[Any]) -> None:
    """Waits for a 200. RuntimeError if the process ends first, or after START_S."""
    began_s = time.monotonic()
    request = post(place, peer.path, request_bodies(peer.template, ["hello"])[0])
    while time.monotonic() - began_s < START_S and process.poll() is None:
        with contextlib.suppress(BadInput):
            if drive(place, [request], connections=1, timeout_s=10).became == [200]:
                return
        time.sleep(0.2)
    raise RuntimeError(f"no answer from {process.args!r} (exit {process.poll()}); its log says why")


def mixed_texts(texts: list[str], pipeline: Pipeline) -> list[str]:
    """Words of `texts` joined to lengths of 1 to MIXED_TOKENS tokens, uniform in the logarithm."""
    chance = random.Random(0)
    words = " ".join(chance.sample(texts, len(texts))).split()
    found = []
    for length in np.exp(np.random.default_rng(0).uniform(0, np.log(MIXED_TOKENS), MIXED_TEXTS)):
        first = chance.randrange(len(words))
        taken = (words[first:] + words)[: max(1, int(length))]
        while (
            len(taken) > 1 and len(pipeline.encode([" ".join(taken)])[0]) - 2 > length
        ):  # [CLS] and [SEP] do not count
            taken.pop()
        found.append(" ".join(taken))
    return found


def drive_once(
    place: Place, peer: Peer, texts: list[str], right: list[str], given: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """The measurements of one server on one set of texts."""
    bodies = request_bodies(peer.template, texts)
    requests = [post(place, peer.path, body) for body in bodies]
    differing = failed = 0

    def driven(connections: int, seconds: float) -> Driven:
        nonlocal differing, failed
        first = drive(place, random.Random(seed).choices(requests, k=WARM_REQUESTS), connections=connections)
        count = max(len(requests), round(WARM_REQUESTS / first.seconds * seconds))
        order = [place for _ in range(-(-count // len(requests))) for place in range(len(requests))]
        random.Random(seed).shuffle(order)
        found = drive(place, [requests[i] for i in order], connections=connections)
        failed += len(order) - found.having(200)
        for i, status, body in zip(order, found.became, found.bodies, strict=True):
            differing += status == 200 and peer.label(json.loads(body)) != right[i]
        return found

    low, peak = driven(1, given.seconds), driven(CONNECTIONS, given.seconds)
    bound = ramp(
        f"http://{place.host}:{place.port}{peer.path}",
        bodies,
        bound_ms=given.bound_ms,
        seconds=given.seconds,
        seed=seed,
    )
    return {
        "low_p50_ms": float(np.percentile(low.latencies_ms, 50)), "low_p99_ms": float(np.percentile(low.latencies_ms, 99)),
        "peak_per_s": peak.having(200) / peak.seconds, "peak_p99_ms": float(np.percentile(peak.latencies_ms, 99)),
        "bound_per_s": bound["rate_per_s"], "bound_doubts": bound["doubts"], "differing": differing, "failed": failed,
    }  # fmt: skip


def rounds(given: argparse.Namespace, log: Path) -> dict[str, Any]:
    """The measurements (server -> set -> a list of rounds), and the servers that did not run, with the reason."""
    pipeline = Pipeline(given.bundle, threads=1)
    texts = read_texts(given.texts)
    sets = {"texts": texts, "mixed": mixed_texts(texts, pipeline)}
    right = {name: [str(each["labels"][0]["label"]) for each in pipeline(each, top_k=1)] for name, each in sets.items()}  # type: ignore[typeddict-item]
    visits: dict[str, Any] = {name: {which: [] for which in sets} for name in given.peers}
    reasons: dict[str, str] = {}
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        folders = model_folders(given.bundle, Path(folder))
        for turn in range(given.rounds):
            for name in chance.sample(given.peers, len(given.peers)):
                if name in reasons:
                    continue
                try:
                    with running(name, given, folders, log) as place:
                        for which, each in sets.items():
                            found = drive_once(place, PEERS[name], each, right[which], given, seed=turn)
                            visits[name][which].append(found)
                            print(
                                f"round {turn + 1}, {name}, {which}: {json.dumps(found)}", file=sys.stderr, flush=True
                            )
                except (RuntimeError, OSError, BadInput) as error:
                    reasons[name] = str(error)
    return {"visits": visits, "did_not_run": reasons}


def summary(visits: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """Medians over the rounds, and ours over each peer's, paired by rounds, with a 95 % interval."""
    found: dict[str, Any] = {}
    for name in peers:
        for which, turns in visits[name].items():
            if not turns:
                continue
            row: dict[str, Any] = {
                key: float(np.median([turn[key] for turn in turns])) for key in turns[0] if key != "bound_doubts"
            }
            ours = visits.get("ours", {}).get(which, [])
            for key in ("peak_per_s", "bound_per_s"):
                speeds = [[turn[key] for turn in each] for each in (turns, ours)]
                if name != "ours" and len(ours) == len(turns) and all(map(all, speeds)):
                    pairs = [[np.array([1 / speed]) for speed in each] for each in speeds]
                    row[f"ours_over_it_{key}"] = paired_ratio(*pairs)
            found.setdefault(which, {})[name] = row
    return found


def versions(environments: Path) -> dict[str, list[str]]:
    return {file.parent.name: file.read_text().splitlines() for file in sorted(environments.glob("*/installed.txt"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--peers", type=lambda listed: listed.split(","), default=list(PEERS), metavar="A,B,...")
    parser.add_argument("--options", default="", help="options of stillroom's server, such as '--batch-tokens 64'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of one closed loop, and of one rate of the open loop"
    )
    parser.add_argument("--bound-ms", type=float, default=50.0)
    parser.add_argument("--log", type=Path, default=Path("peers.log"), help="file for the servers' output")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if unknown := sorted(set(given.peers) - set(PEERS)):
        parser.error(f"unknown peer: {', '.join(unknown)}; give some of {', '.join(PEERS)}")
    facts = machine_facts()
    taken = rounds(given, given.log)
    rows = summary(taken["visits"], given.peers)
    for which, by_name in rows.items():
        print(
            f"\n{which:16s}{'low p50':>9s}{'p99 ms':>9s}{'peak/s':>9s}{'p99 ms':>9s}{'bound/s':>9s}{'differ':>8s}{'failed':>8s}"
        )
        for name, row in by_name.items():
            print(
                f"{name:16s}{row['low_p50_ms']:9.2f}{row['low_p99_ms']:9.2f}{row['peak_per_s']:9.0f}{row['peak_p99_ms']:9.1f}"
                f"{row['bound_per_s']:9.0f}{row['differing']:8.0f}{row['failed']:8.0f}"
            )
    for name, reason in taken["did_not_run"].items():
        print(f"{name} did not run: {reason}")
    if given.json:
        document = {
            "machine": facts,
            "versions": versions(given.environments),
            "settings": vars(given) | {name: os.environ.get(name) for name in ("MAX_BATCH", "FAST_QUEUE")},
            "summary": rows,
            **taken,
        }
        given.json.write_text(json.dumps(document, indent=1, default=str))
    return 1 if taken["did_not_run"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
