"""`export` of a checkpoint: what the bundle, its card and its report hold, and what is refused."""

import filecmp
import itertools
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import yaml
from command_line import here
from repository import ROOT
from small_task import examples, write_rows

import stillroom as face
from compress.runs.resumable_stages import Workdir
from serve.bundle.cpu import cpu_features, read_cores, suits, why
from serve.bundle.runtimes import choose
from serve.errors import BadInput, GateMissed
from serve.model.pipeline import Pipeline
from serve.model.session import Session, onnxruntime_options, onnxruntime_session
from serve.tasks import open_bundle
from serve.text.tokenizer import load_tokenizer
from stillroom.verbs.export.checkpoint import scores_on_test

FAST = {"latency_seconds": 0.0, "threads": 1}


# Weights of units that all say the same: their sum is 0. What rounds them to so many bits of the largest makes it another, by
# a multiple of what the other layers say: to 7 bits 63, -56 and 14 times -0; to 8 bits 127, -113 and 14 times -1, still 0.
HELD_BY_EIGHT_BITS = (127, -113, *[-1] * 14)
# To 8 bits 127, -121 and 14 times -0, to 7 bits 63, -60 and 14 times -0.
HELD_BY_NEITHER = (889, -847, *[-3] * 14)


def with_cancelling_units(checkpoint: Path, folder: Path, weights: tuple[int, ...]) -> Path:
    """`checkpoint` with constant units in a feed-forward, and nothing else in it, that cancel out unless they are rounded.

    All sums of theirs are exact in float32, in any order, so that no processor sees anything of them there.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    layer = model.bert.encoder.layer[1]
    layer.intermediate.dense.weight.data[:16] = 0
    layer.intermediate.dense.bias.data[:16] = 8
    layer.output.dense.weight.data.zero_()
    for channel, row in enumerate(layer.output.dense.weight.data):
        # Each unit has each weight in some channel, so that no unit is an outlier; the sum leans to either side.
        row[:16] = torch.tensor(weights).roll(channel) * (0.125 if channel % 3 else -0.125)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory, classifier: Path, task_data: Path) -> tuple[Path, str]:
    """A bundle of few words, of pairs of texts without a validation file, one of train in test; and what was said."""
    folder = tmp_path_factory.mktemp("trimmed")
    train, test = (
        [{**json.loads(line), "text_pair": "hello"} for line in (task_data / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    )
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "test.jsonl", [train[0], *test])
    pair = {"text": "please refund the kettle 17", "text_pair": "thank you team the lamp is great"}
    words = write_rows(folder / "words.jsonl", [pair])
    with redirect_stderr(StringIO()) as said:
        out = exported(classifier, folder / "few", folder, variants="fp32", keep_words_of=(words,), **FAST)
    return out, said.getvalue()


def exported(*given: Path, **settings: object) -> Path:
    """The bundle of an export that passes."""
    return Path(face.export(*given, **settings)["bundle"])


def report_of(bundle: Path) -> dict[str, Any]:
    """The report in `bundle`, or beside where it would stand."""
    file = bundle / "report.json" if bundle.exists() else bundle.with_name(f"{bundle.name}.report.json")
    document: dict[str, Any] = json.loads(file.read_text())
    return document


@pytest.fixture(scope="module")
def unsure(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path, task_data: Path) -> Path:
    """The same after one epoch: a small change of its logits shows in its probabilities."""
    settings: dict[str, Any] = {"epochs": 1, "learning_rate": 1e-3, "batch": 8, "threads": 1}
    given = (str(shallow_teacher), "text-classification", str(task_data), tmp_path_factory.mktemp("ckpt") / "unsure")
    return face.finetune(*given, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_served_in_any_company_static_int8_gives_the_same_bytes_and_dynamic_does_not(
    unsure: Path, task_data: Path, tmp_path: Path, scheme: str
) -> None:
    bundle = exported(unsure, tmp_path / "intents", task_data, variants="fp32,int8", int8=scheme, gate=0.0, **FAST)
    needed = open_bundle(bundle).manifest.variants["int8"].cpu
    if not suits(needed, cpu_features()):
        pytest.skip(f"a server runs this int8 file only on a processor with one of {', '.join(needed)}")
    rows = [json.loads(line)["text"] for line in (task_data / "test.jsonl").read_text().splitlines()]
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(" ".join(rows[i : i + 1 + i % 5]) for i in range(len(rows))) + "\n")
    program = ROOT / "benchmarks" / "serve" / "company.py"
    command = [sys.executable, program, bundle, texts, "--connections", "8", "--variant", "int8"]
    done = subprocess.run([*command, "--json", tmp_path / "found.json"], capture_output=True, text=True, check=False)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["lost"], found["in_company"]) == (0, 3 * found["texts"])
    assert found["texts"] > 50
    assert (found["differing"] == 0, done.returncode) == ((True, 0) if scheme == "static" else (False, 1))


@pytest.mark.slow
def test_every_precision_is_made_checked_and_served(classifier: Path, task_data: Path, tmp_path: Path) -> None:
    document = face.export(classifier, tmp_path / "one", task_data, variants="fp32,fp16,int8", **FAST)
    out = tmp_path / "one"
    manifest = open_bundle(out).manifest
    told = (str(out), str(out / "report.html"), "accuracy")
    assert (document["bundle"], document["report"], document["metric"]) == told
    assert list(document["variants"]) == ["fp32", "fp16", "int8"]
    assert document["variants"]["int8"]["size_bytes"] == (out / "onnx" / "model_quantized.onnx").stat().st_size
    passed = {gate["name"] for gate in document["gates"] if gate["passed"]}
    assert passed == {f"{name} over fp32, validation" for name in ("fp16", "int8")}
    assert document["scores"] == {split: manifest.metrics[split] for split in ("validation", "test")}
    assert document["scores"]["test"]["int8"].keys() == {"value", "low", "high"}
    assert (document["claims"], document["warnings"]) == (report_of(out)["claims"], report_of(out)["warnings"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
    texts = [json.loads(line)["text"] for file in task_data.iterdir() for line in file.read_text().splitlines()]
    for name in ("report.html", "report.json", "README.md", "manifest.json"):
        content = (out / name).read_text()
        assert not [text for text in texts if text in content], name
    assert (manifest.default_variant, sorted(manifest.variants)) == ("int8", ["fp16", "fp32", "int8"])
    answers = {variant: face.Pipeline(out, variant)("please refund the lamp") for variant in manifest.variants}
    assert {answer["labels"][0]["label"] for answer in answers.values()} == {"refund"}
    said = {name: row["value"] for name, row in manifest.metrics["test"].items()}
    assert {"fp32", "fp16", "int8"} <= set(said)
    assert min(said.values()) > 0.9
    page = (out / "report.html").read_text()
    assert all(heading in page for heading in ("Gates", "Agreement", "Quantisation", "Kernels", "Parity"))
    shown = here("inspect", out)
    assert shown.returncode == 0
    assert f"This machine runs int8 in onnxruntime. In Python a call uses {why(read_cores())}; " in shown.stdout


@pytest.mark.slow
def test_two_exports_are_the_same_bytes_but_for_what_their_reports_say_of_the_moment(
    classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    one, other = (
        exported(classifier, tmp_path / where / "same", task_data, name="same", **FAST) for where in ("a", "b")
    )
    paths = {path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file()}
    names = sorted(paths - {"manifest.json", "report.html", "report.json"})
    assert {"README.md", "onnx/model_quantized.onnx"} <= set(names)
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])
    assert open_bundle(one).manifest.digest == open_bundle(other).manifest.digest


@pytest.mark.slow
def test_a_product_that_eight_bits_ruin_goes_back_to_float32(classifier: Path, task_data: Path, tmp_path: Path) -> None:
    broken = with_cancelling_units(classifier, tmp_path / "broken", HELD_BY_NEITHER)
    out = exported(broken, tmp_path / "mended", task_data, gate=0.9, variants="int8", **FAST)
    search = report_of(out)["search"]
    assert max(attempt["verdict"]["share"] for attempt in search["tried"]) < 0.6
    assert [step["product"] for step in search["repaired"]] == ["bert.encoder.layer.1.output.dense"]
    assert search["held"]
    card = (out / "README.md").read_text()
    assert "left in float32: bert.encoder.layer.1.output.dense" in card
    # Nothing in the bundle is fp32, and nothing is known of a teacher.
    assert "| **int8** | accuracy |" in card
    assert not any(word in card for word in ("| fp32", "istilled", "teacher"))
    assert open_bundle(out).manifest.variants["int8"].cpu == []
    assert face.Pipeline(out)("please refund the lamp")["labels"][0]["label"] == "refund"


class ExactSums(Session):
    """A session in onnxruntime that multiplies dequantised numbers in float32: no processor saturates there."""

    def __init__(self, onnx_file: Path, threads: int | None = None, *_: object) -> None:
        super().__init__(onnx_file, threads)
        options = onnxruntime_options(self.threads)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime_session(onnx_file, options)
        self._run = lambda feeds, output: session.run([output], feeds)[0]


@pytest.mark.slow
def test_a_graph_that_needs_all_eight_bits_asks_for_a_processor_that_has_them(
    classifier: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a processor with VNNI, whatever runs this test: it is believed to be one, and judges by the sums of one.
    monkeypatch.setattr("export.precision.int8_search.cpu_features", lambda: frozenset({"avx512_vnni"}))
    monkeypatch.setattr("export.precision.int8_search.Session", ExactSums)
    broken = with_cancelling_units(classifier, tmp_path / "broken", HELD_BY_EIGHT_BITS)
    out = exported(broken, tmp_path / "eight", task_data, gate=0.9, **FAST)
    assert [attempt["weight_bits"] for attempt in report_of(out)["search"]["tried"]] == [7, 7, 8, 8]
    needs = open_bundle(out).manifest.variants["int8"].cpu
    assert "avx512_vnni" in needs
    assert choose(open_bundle(out), features=["avx2"]).variant == "fp32"
    assert choose(open_bundle(out), features=needs[:1]).variant == "int8"
    assert "8-bit weights need a processor with avx512_vnni" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_gate_that_nothing_holds_leaves_a_report_and_no_bundle(
    classifier: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.precision.int8_search.MOST_KEPT", 0.0)  # nothing may be put back
    broken = with_cancelling_units(classifier, tmp_path / "broken", HELD_BY_NEITHER)
    with pytest.raises(GateMissed, match=r"int8 over fp32, validation is 0\.\d+, needed 0\.9") as missed:
        face.export(broken, tmp_path / "out", task_data, gate=0.9, **FAST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "out.report.html", "out.report.json"]
    document = missed.value.document
    assert document is not None
    assert (document["bundle"], document["report"]) == (None, str(tmp_path / "out.report.html"))
    assert [(gate["name"], gate["passed"]) for gate in document["gates"]] == [("int8 over fp32, validation", False)]
    assert document["scores"].keys() == {"validation"}
    assert not report_of(tmp_path / "out")["search"]["held"]


def test_a_promise_that_can_be_kept_is_in_the_manifest_and_another_one_leaves_a_report_alone(
    classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    settings = {"variants": "fp32", **FAST}
    bundle = exported(classifier, tmp_path / "kept", task_data, promises=("precision=0.8", "recall=0.5"), **settings)
    promises = open_bundle(bundle).manifest.variants["fp32"].promises
    assert promises.keys() == {"precision=0.8", "recall=0.5"}
    assert promises["precision=0.8"] < promises["recall=0.5"] <= 1
    assert "labels" in Pipeline(bundle, "fp32")("please refund the lamp", promise="precision=0.8")
    card = (bundle / "README.md").read_text()
    assert "fp32: precision=0.8 is promised with no confidence: chosen on the same texts." in card
    told_of = open_bundle(bundle).manifest.variants["fp32"].promise_confidence
    assert told_of == "no confidence: chosen on the same texts"
    told = report_of(bundle)["promises"]["fp32"]
    assert [each["of"] for each in told] == ["precision", "recall"]
    with pytest.raises(
        BadInput, match=r"recall=0\.99 .* takes 299 right answers at least, and validation has 40 answers"
    ):
        face.export(classifier, tmp_path / "out", task_data, promises=("recall=0.99",), **settings)
    folder = shutil.copytree(task_data, tmp_path / "mislabelled")
    rows = [json.loads(line) for line in (folder / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    write_rows(folder / "validation.jsonl", [row | {"label": "praise"} for row in rows])
    with pytest.raises(GateMissed, match=r"--promise recall=0.9 cannot be kept .* recall=0\.\d* could"):
        face.export(classifier, tmp_path / "out", folder, promises=("recall=0.9",), **settings)
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match="no labelled texts"):
        face.export(classifier, tmp_path / "out", promises=("recall=0.9",), **settings)


def test_without_data_fp32_is_exported_and_nothing_is_said_to_be_scored(classifier: Path, tmp_path: Path) -> None:
    document = face.export(classifier, tmp_path / "out", **FAST)
    manifest = open_bundle(tmp_path / "out").manifest
    assert (list(manifest.variants), manifest.labels) == (["fp32"], ["praise", "refund", "status"])
    assert manifest.parity["fp32"]["passed"]
    assert manifest.parity["fp32"]["texts"] > 200
    assert (document["scores"], document["gates"]) == ({}, [])
    assert manifest.metrics == {"metric": "accuracy", "confidence": {}}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "No scores were measured" in card
    assert "No scores were measured" in document["claims"][0]
    assert not any(word in card for word in ("## Scores", "test split", "temperature"))
    assert "No scores were measured" in (tmp_path / "out" / "report.html").read_text()
    assert face.Pipeline(tmp_path / "out")("please refund the lamp")["labels"][0]["label"] == "refund"


@pytest.mark.slow
def test_without_data_fp16_is_made_on_request_and_held_to_the_tolerance_that_is_given(
    classifier: Path, tmp_path: Path
) -> None:
    face.export(classifier, tmp_path / "out", variants=("fp32", "fp16"), atol=1e-3, **FAST)
    manifest = open_bundle(tmp_path / "out").manifest
    assert list(manifest.variants) == ["fp16", "fp32"]
    assert manifest.parity["fp16"]["passed"]
    assert "0.001" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(GateMissed, match="--atol"):
        face.export(classifier, tmp_path / "strict", atol=1e-12, **FAST)


def test_without_data_int8_is_calibrated_on_unlabelled_texts_and_held_to_the_labels_of_float32(
    classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    texts = (str(task_data / "train.jsonl"),)
    document = face.export(classifier, tmp_path / "out", variants="fp32,int8", texts=texts, **FAST)
    (gate,) = document["gates"]
    assert (gate["name"], gate["needed"], gate["passed"]) == ("int8 has fp32's labels, 120 texts", 0.99, True)
    assert list(open_bundle(tmp_path / "out").manifest.variants) == ["fp32", "int8"]


@pytest.mark.slow
def test_licences_language_and_the_teachers_name_on_the_hub_are_on_the_card_and_the_load_is_that_of_the_start(
    classifier: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Path(shutil.copytree(classifier, tmp_path / "known"))
    lineage = json.loads((known / "lineage.json").read_text())
    (known / "lineage.json").write_text(json.dumps({**lineage, "base_model": "bert-base-uncased"}))
    loads = itertools.count(0.25)  # rising, as while an export works
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    told = {"license": "apache-2.0", "data_license": "CC0", "language": "en"}
    out = exported(known, tmp_path / "out", task_data, variants="fp32", threads=1, latency_seconds=0.01, **told)
    front = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])
    assert (front["license"], front["language"], front["base_model"]) == ("apache-2.0", "en", "bert-base-uncased")
    assert "Licence of the model: apache-2.0; of the data: CC0." in (out / "README.md").read_text()
    report = report_of(out)
    assert report["machine"]["load_average"] == 0.25
    assert report["latency"]["machine"] == report["machine"]


@pytest.mark.slow
def test_doubts_about_the_data_are_told_as_a_run_tells_them(trimmed: tuple[Path, str]) -> None:
    out, said = trimmed
    expected = [
        "There is no validation file: 24 texts of train were held out instead.",
        "1 text is in more than one split (train, test): scores on them are too high for every model.",
    ]
    assert report_of(out)["warnings"][:2] == expected
    assert re.findall("^warning: (.*)", said, re.MULTILINE) == expected
    assert open_bundle(out).manifest.pairs


def test_texts_out_of_scope_choose_the_threshold_and_are_no_errors_of_the_model(
    classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    for split, count in (("train", 3), ("validation", 10), ("test", 20)):
        rows = [json.loads(line) for line in (task_data / f"{split}.jsonl").read_text().splitlines()]
        strange = [{"text": f"how tall is a tower of {i} bricks", "label": "strange"} for i in range(count)]
        write_rows(tmp_path / f"{split}.jsonl", rows + strange)
    out = exported(classifier, tmp_path / "one", tmp_path, variants="fp32", out_of_scope="strange", **FAST)
    manifest = open_bundle(out).manifest
    plain = open_bundle(exported(classifier, tmp_path / "plain", task_data, variants="fp32", **FAST)).manifest
    assert manifest.metrics["test"] == plain.metrics["test"]
    assert "strange" not in manifest.labels
    assert manifest.variants["fp32"].temperature == plain.variants["fp32"].temperature
    assert manifest.variants["fp32"].abstain_below != plain.variants["fp32"].abstain_below
    test = manifest.metrics["confidence"]["fp32"]["test"]
    assert (test["rows"], test["out_of_scope_texts"]) == (60, 20)
    line = f"Below a probability of {manifest.variants['fp32'].abstain_below:g} it abstains: "
    assert line in (out / "README.md").read_text()
    assert line in (out / "report.html").read_text()
    assert report_of(out)["confidence"] == manifest.metrics["confidence"]


def test_where_a_bundle_cannot_be_written_no_report_speaks_of_one_and_what_a_kill_left_is_cleared(
    classifier: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def another_comes_first(*args: object) -> tuple[object, object]:
        out.mkdir()
        (out / "diary").touch()
        return scores_on_test(*args)  # type: ignore[arg-type]

    # What a killed export and its packing leave, and a report of an earlier one.
    for left in ("out.export-work/scratch/checkpoint", ".out.4711.partial/onnx"):
        (tmp_path / left).mkdir(parents=True)
    (tmp_path / "out.export-work" / "made-by-stillroom").touch()
    (tmp_path / "out.report.json").write_text("{}")
    monkeypatch.setattr("stillroom.verbs.export.checkpoint.scores_on_test", another_comes_first)
    with pytest.raises(BadInput, match="not a bundle"):
        face.export(classifier, out, task_data, variants="fp32", **FAST)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/diary"]


def test_a_second_export_to_the_same_place_is_refused_and_harms_nothing(
    classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (tmp_path / "out.report.json").write_text("{}")
    with Workdir(tmp_path / "out.export-work").scratch() as folder:  # as the first one works
        (folder / "half a graph").touch()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BadInput, match=r"Another run uses .*out\.export-work"):
            face.export(classifier, out, task_data, **FAST)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_dynamic_int8_is_never_the_default(classifier: Path, task_data: Path, tmp_path: Path) -> None:
    out = exported(classifier, tmp_path / "out", task_data, int8="dynamic", **FAST)
    manifest = open_bundle(out).manifest
    assert (manifest.default_variant, manifest.variants["int8"].scheme) == ("fp32", "dynamic")
    assert "its answer to a text depends on the batch" in (out / "README.md").read_text()


@pytest.mark.slow
def test_openvino_is_pinned_when_asked_for(classifier: Path, task_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    out = exported(classifier, tmp_path / "out", task_data, runtime="openvino", **FAST)
    manifest = open_bundle(out).manifest
    assert (manifest.variants["int8"].runtime, manifest.variants["fp32"].runtime) == ("openvino", "onnxruntime")
    assert face.Pipeline(out).session.runtime == "openvino"
    assert manifest.parity["int8 openvino"]["company_differences"] == 0
    assert "| **int8 openvino** | accuracy |" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_vocabulary_is_trimmed_to_the_words_that_are_used(trimmed: tuple[Path, str], classifier: Path) -> None:
    out, _ = trimmed
    told = report_of(out)["vocabulary"]
    assert told["kept"] < told["tokens"]
    # Both texts of each of the 24 pairs that were held out; of those whose words were kept, "lamp" is in the second.
    assert told["texts"] == 48
    assert load_tokenizer(out, 64).encode("refund lamp", add_special_tokens=False).tokens == ["refund", "lamp"]
    assert told["texts_split_otherwise"] > 0
    assert told["unknown"] == told["unknown_before"] == 0
    kept, whole = (Pipeline(at, "fp32") for at in (out, exported(classifier, out.with_name("whole"), **FAST)))
    text = "please refund the kettle 17"
    assert [each["label"] for each in kept(text)["labels"]] == [each["label"] for each in whole(text)["labels"]]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"variants": "fp32,int4"}, "--variants is 'int4' .*int8"),
        ({"variants": ","}, "--variants is empty"),
        ({"int8": "magic"}, "--int8 is 'magic'.*static, weight-only, dynamic"),
        ({"keep_right": 95}, "--keep-right is 95"),
        ({"gate": 99}, "--gate is 99"),
        ({"runtime": "tvm"}, "--runtime is 'tvm'.*onnxruntime, openvino"),
        ({"fuse": "everything"}, "--fuse is 'everything'"),
        ({"latency_seconds": -1.0}, "--latency-seconds is -1"),
        ({"keep_words_of": (Path("nowhere.txt"),)}, "nowhere.txt"),
        ({"speed": 1}, "speed is not a setting"),
        ({"texts": ("one.txt",)}, "--texts and --data are both given"),
        ({"out_of_scope": "nowhere"}, "--out-of-scope nowhere"),
        ({"out_of_scope": "refund"}, "--out-of-scope refund"),
        ({"promise_data": "rows.jsonl"}, "--promise-data needs --promise"),
        ({"data": None, "out_of_scope": "strange"}, "--out-of-scope needs --data"),
        ({"data": None, "variants": "fp32,int8"}, "--variants int8 .*--data, .* or --texts"),
        ({"data": None, "variants": "int8", "texts": ("one.txt",)}, "--texts .*one.txt has 1 text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_exports_that_cannot_be_made_are_refused_and_write_nothing(
    classifier: Path,
    task_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, Any],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("please refund the lamp\n" * 3)
    with pytest.raises(BadInput, match=named):
        face.export(classifier, tmp_path / "out", **({"data": task_data} | FAST | wrong))
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 labelled texts that the task's data lacks."""
    return write_rows(tmp_path_factory.mktemp("apart") / "apart.jsonl", examples(90, seed=9))


def test_promises_are_made_on_the_texts_that_are_given_for_them(
    classifier: Path, task_data: Path, apart: Path, tmp_path: Path
) -> None:
    shared = json.loads((task_data / "validation.jsonl").read_text(encoding="utf-8").splitlines()[0])
    file = tmp_path / "more.jsonl"
    file.write_text(apart.read_text(encoding="utf-8") + 2 * (json.dumps(shared) + "\n"), encoding="utf-8")
    settings = {"variants": "fp32", "promises": ("precision=0.8",), **FAST}
    bundle = exported(classifier, tmp_path / "kept", task_data, promise_data=str(file), **settings)
    (told,) = report_of(bundle)["promises"]["fp32"]
    assert told["apart"] == "--promise-data"
    assert told["made_on"]["texts"] == 90  # not the 40 of validation, and not the one that validation has too
    assert any(said.startswith("2 texts of --promise-data") for said in report_of(bundle)["warnings"])
    assert "on texts like those of --promise-data" in (bundle / "README.md").read_text()


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"text": "a strange one", "label": "unheard of"}], "unheard of"),
        ([{"text": "two at once", "label": ["refund", "praise"]}], "another kind"),
        ([], "no rows"),
        (None, "the data has each of its 40 texts too"),
    ],
)
def test_texts_that_no_promise_can_be_made_on_are_refused(
    rows: list[dict[str, object]] | None, named: str, classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    file = task_data / "validation.jsonl" if rows is None else write_rows(tmp_path / "rows.jsonl", rows)
    settings = {"promise_data": str(file), "promises": ("precision=0.8",), **FAST}
    with pytest.raises(BadInput, match=named):
        face.export(classifier, tmp_path / "out", task_data, **settings)
    assert not (tmp_path / "out").exists()


def test_no_promise_is_made_on_texts_that_the_checkpoint_may_have_learned(
    classifier: Path, trimmed: tuple[Path, str], tmp_path: Path, task_data: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        shutil.copy(task_data / f"{split}.jsonl", folder)
    with pytest.raises(
        BadInput, match=r"--promise precision=0\.5 needs labelled texts that the checkpoint has not learned"
    ):
        face.export(classifier, tmp_path / "bundle", str(folder), promises=("precision=0.5",), **FAST)
    assert not (tmp_path / "bundle").exists()
    claims = report_of(trimmed[0])["claims"]
    assert any("chosen on a tenth of train, which the checkpoint may have learned" in each for each in claims)
