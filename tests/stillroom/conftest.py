"""Profiles of small models, each made once."""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from in_process import command
from lookup_bundles import INTENTS, city_table, intent_table, write_bundle, write_manifest, write_tokenizer
from small_profiles import CONFIG, TASK, Models, Profiled, intents, profiled, write_checkpoint
from small_task import write_rows

from stillroom.verbs.profile import Profiling
from stillroom.verbs.profile.run import profile_models


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that finds cities."""
    return write_bundle(tmp_path_factory.mktemp("bundles") / "cities", city_table())


@pytest.fixture(scope="session", name="intents")
def bundle_of_intents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "intents"
    return write_bundle(folder, intent_table(), task=TASK, labels=INTENTS)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    given = {"task": TASK, "labels": INTENTS}
    fast = write_bundle(folder / "fast", intent_table(), layers=1, **given)
    slow = write_bundle(folder / "slow", intent_table(), layers=48, **given)
    several = write_bundle(folder / "several", intent_table() - 1, layers=1, multi_label=True, **given)
    copied = shutil.copytree(fast, folder / "elsewhere" / "fast")
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(fast / "onnx" / "model.onnx", alone)
    write_tokenizer(alone)
    (alone / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return Models(fast, copied, slow, several, write_checkpoint(folder / "checkpoint"), alone / "model.onnx")


@pytest.fixture(scope="session")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 labelled texts to train on, and 50 to test."""
    folder = tmp_path_factory.mktemp("splits")
    write_rows(folder / "train.jsonl", intents(60, seed=0))
    write_rows(folder / "test.jsonl", intents(50, seed=1))
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 40 labelled pairs of texts; in half of them the second one tells the intent."""
    rows = intents(40, seed=2)
    given = [
        {**row, "text": "i please it", "text_pair": row["text"]} if number % 2 else {**row, "text_pair": "it"}
        for number, row in enumerate(rows)
    ]
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", given)


@pytest.fixture(scope="session")
def earlier(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """The fast bundle alone, without data."""
    return profiled(tmp_path_factory.mktemp("earlier") / "timings", models.fast)


@pytest.fixture(scope="session")
def together(models: Models, splits: Path, earlier: Profiled, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """A copy of that bundle, the checkpoint and the file on a folder of splits, against the bundle of before."""
    given = (models.copied, models.checkpoint, models.file, "--data", splits)
    asked = ("--budget-ms", "60000", "--percentile", "90", "--price-per-core-hour", "0.05", "--json")
    out = tmp_path_factory.mktemp("together") / "timings"
    return profiled(out, *given, *asked, "--against", earlier.out / "report.json")


@pytest.fixture(scope="session")
def slower(models: Models, pairs: Path, earlier: Profiled, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """The slow bundle, and one of another kind of labels, on pairs of texts, against the fast one of before."""
    out = tmp_path_factory.mktemp("slower") / "timings"
    return profiled(out, models.slow, models.several, "--data", pairs, "--against", earlier.out / "report.json")


@pytest.fixture(scope="session")
def whole(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fast bundle with the checkpoint in it."""
    folder = shutil.copytree(models.fast, tmp_path_factory.mktemp("whole") / "whole")
    for file in ("config.json", "model.safetensors"):
        shutil.copy(models.checkpoint / file, folder)
    write_manifest(folder, task=TASK, labels=INTENTS)
    return folder


@pytest.fixture(scope="session")
def on_both(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """That bundle in torch and onnxruntime, on CPU and GPU, on a file of short texts first and long ones after."""
    folder = tmp_path_factory.mktemp("both")
    file = folder / "sorted.txt"
    file.write_text("fly\n" * 1000 + "fly to rome to fly to rome to rome to\n" * 1000, encoding="utf-8")
    settings = Profiling(
        data=str(file), out=str(folder / "timings"),
        device=("cpu", "cuda"), runtimes=("torch", "onnxruntime"), seconds=0.1, batches=(1,), lengths=(8,),
        threads=1,
    )  # fmt: skip
    said = io.StringIO()
    with redirect_stderr(said):
        document = profile_models([whole], settings)
    return Profiled(0, folder / "timings", " ".join(said.getvalue().split()), dict(document), "")


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """`refused(ARGUMENTS)`: the message of a `stillroom profile` that exits with 2 and writes nothing."""

    def call(*arguments: str | Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        ended = command("profile", *arguments)
        assert (ended.code, ended.out) == (2, ""), ended.said
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return ended.said

    return call
