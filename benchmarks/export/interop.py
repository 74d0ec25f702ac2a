"""Check that other libraries read a bundle and give the same answers as `Pipeline`. Prints a table of six loaders.

    python -m venv optimum && optimum/bin/pip install optimum-onnx onnxruntime
    npm install --prefix node --ignore-scripts @huggingface/transformers
    python benchmarks/export/interop.py BUNDLE --texts test.jsonl --optimum optimum/bin/python --node node

transformers opens the folder. optimum (in its own environment, since it pins transformers below 4.58) and transformers.js, in Node
and in headless Chromium, classify through their own pipelines. OpenVINO and a bare onnxruntime get only `onnx/*.onnx`,
`tokenizer.json` and `config.json`. A text agrees if its label is the same; for token classification, if the labels of all its tokens
are. A loader without its environment is listed as not run, with the reason. Nothing is downloaded: Node's `fetch` raises an error,
and Chromium resolves no host name. The exit code is 1 if a loader that ran failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from serve.model.pipeline import Pipeline
from serve.model.session import openvino_core
from serve.tasks import open_bundle
from serve.text.answers import softmax

HERE = Path(__file__).parent
GRAPHS = {"fp32": "onnx/model.onnx", "int8": "onnx/model_quantized.onnx"}
THREADS = 1  # of every runtime; nothing is timed
WORKER_TIMEOUT_S = 300
SHOWN = 100  # characters of a text whose answers differ

Places = dict[int, tuple[str, float]]
"""The answer to one text: label and score by token, without special tokens; for text classification, at 0."""


class NotRun(Exception):
    """The environment of a loader is missing, or the bundle lacks a file for it."""


@dataclass(frozen=True)
class Told:
    """The results of a loader: its answers to each text by variant, its versions, and its printed lines."""

    versions: dict[str, str]
    answers: dict[str, list[Places]]
    said: list[str]


@dataclass(frozen=True)
class Own:
    """The pipeline's answer at one place. `margin` is its score less that of the second label."""

    label: str
    score: float
    margin: float
    token: str
    unknown: bool


@dataclass
class Agreement:
    """How many of a loader's answers to `texts` texts agree with the pipeline's."""

    texts: int = 0
    agreeing: int = 0
    places: int = 0
    left_out: int = 0
    """Unknown tokens without an answer of the loader: transformers.js treats `[UNK]` as a special token."""
    unmatched: int = 0
    """Places with an answer of only one of the two, without those of `left_out`."""
    largest: float = 0.0
    """The largest difference of the scores of one label."""
    widest: float = 0.0
    """The pipeline's largest margin at a place with another label: small if all of these were near ties."""
    differences: list[str] = field(default_factory=list)


def own_answers(bundle: Path, texts: Sequence[str], variant: str) -> list[dict[int, Own]]:
    """The answers of `Pipeline` to each text alone, before spans are decoded."""
    pipeline = Pipeline(bundle, variant, threads=THREADS)
    labels = pipeline.manifest.labels
    answers = []
    for encoding in pipeline.encode(list(texts)):
        rows = softmax(np.atleast_2d(pipeline.session.run([encoding])[0]))  # (places, labels)
        tokens = encoding.tokens if pipeline.manifest.task == "token-classification" else [""]
        places = {}
        for place in _places(encoding, rows):
            second, first = np.argsort(rows[place], kind="stable")[-2:]
            score = float(rows[place, first])
            unknown = tokens[place] == getattr(pipeline.tokenizer.model, "unk_token", None)
            places[place] = Own(labels[first], score, score - float(rows[place, second]), tokens[place], unknown)
        answers.append(places)
    return answers


def agreement(texts: Sequence[str], own: Sequence[dict[int, Own]], theirs: Sequence[Places]) -> Agreement:
    """Compare place by place. A text does not agree if the loader has answers at more or fewer places, except `[UNK]`."""
    found = Agreement()
    for text, expected, actual in zip(texts, own, theirs, strict=True):
        found.texts += 1
        shown = repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
        strange = sorted(actual.keys() - expected.keys())
        differs = [f"{shown}: only theirs has an answer at place {place}" for place in strange]
        for place, ours in expected.items():
            if place not in actual:
                found.left_out += ours.unknown
                differs += [] if ours.unknown else [f"{shown}: theirs has no answer at place {place}, {ours.token!r}"]
        found.unmatched += len(differs)
        for place in sorted(expected.keys() & actual.keys()):
            ours, (label, score) = expected[place], actual[place]
            found.places += 1
            if label == ours.label:
                found.largest = max(found.largest, abs(score - ours.score))
                continue
            found.widest = max(found.widest, ours.margin)
            differs.append(
                f"{shown} {ours.token}: stillroom {ours.label} {ours.score:.4f} (margin {ours.margin:.4f}), "
                f"theirs {label} {score:.4f}"
            )
        found.agreeing += not differs
        found.differences += differs
    return found


def in_transformers(bundle: Path, texts: Sequence[str], variants: Sequence[str]) -> Told:
    """The checkpoint itself, by the Auto classes, in float32."""
    import torch
    import transformers

    if not (bundle / "model.safetensors").is_file():
        raise NotRun("the bundle was exported without its checkpoint")
    if "fp32" not in variants:
        raise NotRun("the bundle has no fp32 to compare the float32 checkpoint with")
    head = "TokenClassification" if _task(bundle) == "token-classification" else "SequenceClassification"
    with overheard() as said:
        model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(bundle)
        tokenizer = transformers.AutoTokenizer.from_pretrained(bundle)
    answers = []
    for text in texts:
        batch = tokenizer(text, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**batch).logits[0].numpy()
        answers.append(_told(batch.encodings[0], logits, [model.config.id2label[i] for i in range(logits.shape[-1])]))
    return Told(_versions("transformers", "torch", "tokenizers"), {"fp32": answers}, said)


def in_optimum(bundle: Path, texts: Sequence[str], variants: Sequence[str], python: str | None) -> Told:
    """transformers' pipelines over optimum's ORTModels, in the environment of `python`."""
    if not python:
        raise NotRun("no --optimum, the Python of an environment with optimum-onnx")
    return _asked([python, str(HERE / "optimum_worker.py")], bundle, texts, variants)


def in_node(bundle: Path, texts: Sequence[str], variants: Sequence[str], folder: str | None) -> Told:
    """transformers.js on onnxruntime-node, from the `node_modules` in `folder`."""
    if not folder:
        raise NotRun("no --node, a folder in whose node_modules @huggingface/transformers is")
    if not (node := shutil.which("node")):
        raise NotRun("node is not installed")
    return _asked([node, str(HERE / "transformers_js_worker.mjs"), folder], bundle, texts, variants)


def in_chromium(
    bundle: Path, texts: Sequence[str], variants: Sequence[str], folder: str | None, chromium: str | None
) -> Told:
    """transformers.js on onnxruntime-web's WebAssembly, from the `node_modules` in `folder`, in a page in Chromium."""
    if not folder:
        raise NotRun("no --node, a folder in whose node_modules @huggingface/transformers is")
    if not chromium:
        raise NotRun("chromium is not installed")
    modules = Path(folder) / "node_modules"
    server = _PageServer(
        {
            "bundle": bundle,
            "page": HERE,
            "library": modules / "@huggingface" / "transformers" / "dist",
            "onnxruntime": modules / "onnxruntime-web" / "dist",
        },
        {"task": _task(bundle), "texts": list(texts), "variants": list(variants)},
    )
    with server.running() as address, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        with _browser(chromium, f"{address}/page/transformers_js_page.html", Path(profile)) as process:
            until = time.monotonic() + WORKER_TIMEOUT_S
            while not server.answered.wait(timeout=0.2):
                if process.poll() is not None:
                    raise RuntimeError(f"{chromium} ended with {process.returncode} before the page had answered")
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"the page gave no answer in {WORKER_TIMEOUT_S} s; it asked for {server.asked_for}"
                    )
    missing = [f"it requested {path}, which does not exist" for path in server.missing if path.startswith("/bundle/")]
    return _read(server.answer, [*server.answer.get("said", []), *missing])


def in_openvino(bundle: Path, texts: Sequence[str], variants: Sequence[str]) -> Told:
    """The graphs in OpenVINO, in float32, also where its default is bfloat16."""
    try:
        core = openvino_core()
    except ImportError:
        raise NotRun("openvino is not installed") from None
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": THREADS}

    def opened(file: Path) -> tuple[list[str], Callable[[dict[str, np.ndarray]], np.ndarray]]:
        compiled = core.compile_model(core.read_model(file), "CPU", settings)
        return [port.any_name for port in compiled.inputs], lambda feeds: compiled(feeds)["logits"]

    return _of_graphs(bundle, texts, variants, opened, "openvino")


def in_onnxruntime(bundle: Path, texts: Sequence[str], variants: Sequence[str]) -> Told:
    """The graphs in onnxruntime, without code of stillroom."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS

    def opened(file: Path) -> tuple[list[str], Callable[[dict[str, np.ndarray]], np.ndarray]]:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return [node.name for node in session.get_inputs()], lambda feeds: session.run(["logits"], feeds)[0]

    return _of_graphs(bundle, texts, variants, opened, "onnxruntime")


def _of_graphs(
    bundle: Path,
    texts: Sequence[str],
    variants: Sequence[str],
    opened: Callable[[Path], tuple[list[str], Callable[[dict[str, np.ndarray]], np.ndarray]]],
    runtime: str,
) -> Told:
    names = json.loads((bundle / "config.json").read_text(encoding="utf-8"))["id2label"]
    labels = [names[str(index)] for index in range(len(names))]
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    limit = json.loads((bundle / "tokenizer_config.json").read_text(encoding="utf-8"))["model_max_length"]
    tokenizer.enable_truncation(min(limit, 10**6))  # a tokenizer without a limit says 10**30
    answers: dict[str, list[Places]] = {}
    with overheard() as said:
        for variant in variants:
            inputs, run = opened(bundle / GRAPHS[variant])
            answers[variant] = []
            for encoding in tokenizer.encode_batch(list(texts)):
                columns = {
                    "input_ids": encoding.ids,
                    "attention_mask": encoding.attention_mask,
                    "token_type_ids": encoding.type_ids,
                }
                feeds = {name: np.array([columns[name]], dtype=np.int64) for name in inputs}  # (1, tokens)
                answers[variant].append(_told(encoding, run(feeds)[0], labels))
    return Told(_versions(runtime, "tokenizers"), answers, said)


def _asked(command: list[str], bundle: Path, texts: Sequence[str], variants: Sequence[str]) -> Told:
    """A worker's answer: it reads one JSON document and writes another as its last line."""
    question = {
        "bundle": str(bundle.resolve()),
        "task": _task(bundle),
        "texts": list(texts),
        "variants": list(variants),
    }
    done = subprocess.run(
        command,
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=WORKER_TIMEOUT_S,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    *chatter, last = done.stdout.strip().splitlines()
    return _read(json.loads(last), [*chatter, *done.stderr.splitlines()])


def _read(answer: dict[str, Any], said: Sequence[str]) -> Told:
    if "error" in answer:
        raise RuntimeError(answer["error"])
    answers = {
        variant: [{place: (label, score) for place, label, score in places} for places in rows]
        for variant, rows in answer["answers"].items()
    }
    return Told(answer["versions"], answers, _once(said))


def _told(encoding: Encoding, logits: np.ndarray, labels: Sequence[str]) -> Places:
    rows = softmax(np.atleast_2d(logits))  # (places, labels)
    return {place: (labels[rows[place].argmax()], float(rows[place].max())) for place in _places(encoding, rows)}


def _places(encoding: Encoding, rows: np.ndarray) -> list[int]:
    """The rows that say something of the text: all tokens that are not special, or the only row there is."""
    if len(rows) == 1:
        return [0]
    return [index for index, special in enumerate(encoding.special_tokens_mask) if not special]


def _task(bundle: Path) -> str:
    """As a stranger would tell it: from the architecture in the bundle's `config.json`."""
    (architecture,) = json.loads((bundle / "config.json").read_text(encoding="utf-8"))["architectures"]
    return "token-classification" if architecture.endswith("ForTokenClassification") else "text-classification"


def _versions(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names}


def _once(lines: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


@contextmanager
def overheard() -> Iterator[list[str]]:
    """The lines written to standard error within it, by the runtimes' C++ too; the list is filled at the end."""
    said: list[str] = []
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said += _once(file.read().decode("utf-8", "replace").splitlines())


class _PageServer(ThreadingHTTPServer):
    """Serves folders under their names and the question at /question; the page posts to /answer. Loopback, any free port."""

    daemon_threads = True

    def __init__(self, folders: dict[str, Path], question: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _PageHandler)
        self.folders = {name: folder.resolve() for name, folder in folders.items()}
        self.question = json.dumps(question).encode()
        self.answer: dict[str, Any] = {}
        self.answered = threading.Event()
        self.asked_for: list[str] = []
        self.missing: list[str] = []

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serves from a thread; yields the address."""
        thread = threading.Thread(target=self.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{self.server_address[1]}"
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _PageHandler(SimpleHTTPRequestHandler):
    """Serves files of the server's folders, and receives the answer."""

    server: _PageServer
    extensions_map = {  # noqa: RUF012 - as its parent has it
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def translate_path(self, path: str) -> str:
        name, _, rest = path.split("?", maxsplit=1)[0].removeprefix("/").partition("/")
        folder = self.server.folders.get(name)
        file = (folder / rest).resolve() if folder else None
        if folder is None or file is None or not file.is_relative_to(folder):
            return os.devnull + "/none"
        return str(file)

    def do_GET(self) -> None:
        self.server.asked_for.append(self.path)
        if self.path != "/question":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.server.question)))
        self.end_headers()
        self.wfile.write(self.server.question)

    def do_POST(self) -> None:
        self.server.answer = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.answered.set()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.server.missing.append(self.path)
        super().send_error(code, message, explain)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing; requests are kept in `asked_for`."""


@contextmanager
def _browser(chromium: str, address: str, profile: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Chromium with a page open, in its own process group, which is ended afterwards."""
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", address,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        for each in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):  # all processes of the group have ended
                os.killpg(process.pid, each)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)


def compare(given: argparse.Namespace) -> bool:
    """Prints the table, each loader's versions and lines, and each difference; returns whether no loader failed."""
    manifest = open_bundle(given.bundle).manifest
    if manifest.multi_label:
        raise SystemExit(
            f"{given.bundle} is a multi-label bundle; give one with one label per text, or for token classification"
        )
    with given.texts.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines][: given.texts_count]
    variants = [variant for variant in GRAPHS if variant in manifest.variants]
    own = {variant: own_answers(given.bundle, texts, variant) for variant in variants}
    loaders: dict[str, Callable[[Path, Sequence[str], Sequence[str]], Told]] = {
        "transformers": in_transformers,
        "optimum": partial(in_optimum, python=given.optimum),
        "transformers.js, Node": partial(in_node, folder=given.node),
        "transformers.js, Chromium": partial(in_chromium, folder=given.node, chromium=given.chromium),
        "OpenVINO": in_openvino,
        "onnxruntime, bare": in_onnxruntime,
    }
    table = [("loader", "variant", "texts that agree", "places", "largest score difference")]
    notes, not_run = [], []
    failed = False
    for name, loader in loaders.items():
        try:
            told = loader(given.bundle, texts, variants)
        except NotRun as reason:
            not_run.append(f"{name}: not run: {reason}")
            continue
        except Exception as error:  # any failure of a loader is a result
            failed = True
            not_run.append(f"{name}: failed, see below")
            notes += ["", f"{name} failed: {type(error).__name__}: {error}"]
            continue
        notes += ["", f"{name}: {', '.join(f'{library} {number}' for library, number in told.versions.items())}"]
        notes += [f"  printed: {line}" for line in told.said]
        for variant, theirs in told.answers.items():
            found = agreement(texts, own[variant], theirs)
            table.append(
                (name, variant, f"{found.agreeing} / {found.texts}", str(found.places), f"{found.largest:.1e}")
            )
            notes += [f"  {variant} left out {found.left_out} unknown tokens"] if found.left_out else []
            notes += [f"  {variant} differs: {line}" for line in found.differences]
    open_bundle(given.bundle)  # verifies that no loader changed a file
    print(f"{given.bundle} ({manifest.task}), {len(texts)} texts of {given.texts}, against Pipeline's answers\n")
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\n".join([*not_run, *notes]))
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines with a field `text`")
    parser.add_argument("--texts-count", type=int, default=200)
    parser.add_argument("--optimum", help="Python of the environment with optimum-onnx")
    parser.add_argument("--node", help="folder whose node_modules has @huggingface/transformers")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    given = parser.parse_args()
    import torch
    from transformers.utils import logging

    torch.set_num_threads(THREADS)
    logging.disable_progress_bar()
    sys.exit(not compare(given))


if __name__ == "__main__":
    main()
