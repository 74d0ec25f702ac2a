"""A bundle of `stillroom export` in the programs that others would open it with, by the functions of benchmarks/export/interop.py.

Those that need an environment of their own are slow tests: STILLROOM_OPTIMUM_PYTHON is the Python of one with optimum-onnx,
STILLROOM_NODE_FOLDER a folder in whose node_modules @huggingface/transformers is.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_task import examples, make_teacher, write_rows

from benchmarks.export.interop import (
    NotRun,
    Own,
    Told,
    agreement,
    compare,
    in_chromium,
    in_node,
    in_onnxruntime,
    in_openvino,
    in_optimum,
    in_transformers,
    own_answers,
)
from serve.bundle.runtimes import has_openvino

VARIANTS = ["fp32", "int8"]
TEXTS = [str(row["text"]) for row in examples(12, seed=3)] + [
    "Where is MY lamp?  (café, Zürich)",
    "refund 😀 the radio",
]
HEADS = {
    "TokenClassification": ["O", "B-city", "I-city", "B-item", "I-item"],
    "SequenceClassification": ["praise", "refund", "status"],
}
# Scores of one graph in float32 differ in the sixth decimal; int8 may round to the other side in another runtime, so that the
# first two of nearly equal labels change places.
LARGEST = {"fp32": 1e-4, "int8": 0.15}
NEAR_TIE = {"fp32": 1e-4, "int8": 0.15}

OPTIMUM = os.environ.get("STILLROOM_OPTIMUM_PYTHON")
NODE = os.environ.get("STILLROOM_NODE_FOLDER")
CHROMIUM = shutil.which("chromium")
needs_node_folder = pytest.mark.skipif(not NODE, reason="STILLROOM_NODE_FOLDER is not set")


# Labels of whole texts differ from those of tokens in nothing but their number, once a program has opened the folder.
@pytest.fixture(
    scope="module", params=[pytest.param(h, marks=pytest.mark.slow if h.startswith("Sequence") else ()) for h in HEADS]
)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a random encoder of one layer with a head, its weights large enough that its answers differ."""
    import torch
    import transformers

    import stillroom as face

    folder = tmp_path_factory.mktemp("interop")
    (folder / "data").mkdir()
    for seed, (name, count) in enumerate((("train", 24), ("validation", 12), ("test", 12))):
        write_rows(folder / "data" / f"{name}.jsonl", examples(count, seed))
    checkpoint = make_teacher(folder / "checkpoint", num_hidden_layers=1, initializer_range=0.3)
    names = dict(enumerate(HEADS[request.param]))
    torch.manual_seed(0)
    getattr(transformers, f"AutoModelFor{request.param}").from_pretrained(
        checkpoint, id2label=names, label2id={name: index for index, name in names.items()}
    ).save_pretrained(checkpoint)
    made = face.export(checkpoint, folder / "bundle--1", folder / "data", gate=0.0, latency_seconds=0, threads=1)
    return Path(made["bundle"])


def check(bundle: Path, told: Told, variants: list[str]) -> None:
    """Every place of every text has the pipeline's label, near ties of int8 excepted."""
    assert list(told.answers) == variants
    for variant in variants:
        own = own_answers(bundle, TEXTS, variant)
        assert len({place.label for places in own for place in places.values()}) > 1
        found = agreement(TEXTS, own, told.answers[variant])
        assert found.texts == len(TEXTS)
        assert found.places + found.left_out == sum(map(len, own))
        assert found.unmatched == 0, found.differences
        assert found.largest < LARGEST[variant]
        assert found.widest < NEAR_TIE[variant], found.differences


@pytest.mark.parametrize(
    ("loader", "variants"),
    [
        pytest.param(in_transformers, ["fp32"], id="transformers"),
        pytest.param(in_onnxruntime, VARIANTS, id="onnxruntime"),
        pytest.param(in_openvino, VARIANTS, id="openvino",
                     marks=pytest.mark.skipif(not has_openvino(), reason="OpenVINO is not installed: pip install openvino")),
    ],
)  # fmt: skip
def test_programs_of_this_environment_open_the_folder_and_agree(
    bundle: Path, loader: Callable[[Path, list[str], list[str]], Told], variants: list[str]
) -> None:
    check(bundle, loader(bundle, TEXTS, VARIANTS), variants)


@pytest.mark.slow
@pytest.mark.skipif(not OPTIMUM, reason="STILLROOM_OPTIMUM_PYTHON is not set")
def test_optimum_agrees(bundle: Path) -> None:
    check(bundle, in_optimum(bundle, TEXTS, VARIANTS, OPTIMUM), VARIANTS)


@pytest.mark.slow
@needs_node_folder
@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_transformers_js_in_node_agrees(bundle: Path) -> None:
    check(bundle, in_node(bundle, TEXTS, VARIANTS, NODE), VARIANTS)


@pytest.mark.slow
@needs_node_folder
@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")
def test_transformers_js_in_chromium_agrees_and_misses_no_file(bundle: Path) -> None:
    told = in_chromium(bundle, TEXTS, VARIANTS, NODE, CHROMIUM)
    check(bundle, told, VARIANTS)
    assert told.said == []


def test_a_bundle_whose_labels_are_mixed_up_does_not_agree(bundle: Path, tmp_path: Path) -> None:
    wrong = shutil.copytree(bundle, tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text(encoding="utf-8"))
    names = config["id2label"]
    config["id2label"] = {index: names[str((int(index) + 1) % len(names))] for index in names}
    (wrong / "config.json").write_text(json.dumps(config), encoding="utf-8")
    own = own_answers(bundle, TEXTS, "fp32")
    for loader in (in_onnxruntime, in_transformers):
        found = agreement(TEXTS, own, loader(wrong, TEXTS, ["fp32"]).answers["fp32"])
        assert found.agreeing == 0
        assert len(found.differences) == found.places == sum(map(len, own))


def test_places_left_out_are_forgiven_only_where_the_token_is_unknown() -> None:
    own = [{1: Own("O", 0.9, 0.8, "fly", False), 2: Own("B-city", 0.6, 0.25, "[UNK]", True)}]
    whole = agreement(["fly 😀"], own, [{1: ("O", 0.85), 2: ("B-city", 0.6)}])
    assert (whole.agreeing, whole.places, whole.left_out, whole.unmatched) == (1, 2, 0, 0)
    assert whole.largest == pytest.approx(0.05)
    without_unknown = agreement(["fly 😀"], own, [{1: ("O", 0.9)}])
    assert (without_unknown.agreeing, without_unknown.left_out, without_unknown.unmatched) == (1, 1, 0)
    without_word = agreement(["fly 😀"], own, [{2: ("B-city", 0.6)}])
    assert (without_word.agreeing, without_word.left_out, without_word.unmatched) == (0, 0, 1)
    another = agreement(["fly 😀"], own, [{1: ("O", 0.9), 2: ("O", 0.5), 3: ("O", 0.9)}])
    assert (another.agreeing, another.unmatched, another.widest) == (0, 1, 0.25)
    assert "stillroom B-city 0.6000 (margin 0.2500), theirs O 0.5000" in another.differences[1]


def test_a_loader_without_its_environment_is_not_run_and_one_that_fails_is_no_success(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    given = {"bundle": bundle, "texts": texts, "texts_count": 5, "node": None, "chromium": "/nowhere/chromium"}
    assert compare(argparse.Namespace(**given, optimum=None))
    printed = capsys.readouterr().out
    assert "optimum: not run: no --optimum" in printed
    assert printed.count("not run: no --node") == 2
    assert printed.count("5 / 5") >= 2  # of fp32 at least, in transformers and in onnxruntime
    with pytest.raises(NotRun, match="chromium is not installed"):
        in_chromium(bundle, TEXTS, VARIANTS, str(tmp_path), None)
    assert not compare(argparse.Namespace(**given | {"texts_count": 1}, optimum=shutil.which("false")))
    assert "optimum: failed, see below" in capsys.readouterr().out
