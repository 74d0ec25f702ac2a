"""Methods side by side on a tiny teacher: equal tokens, rows that are kept, faults told before anything is trained."""

import json
import math
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_line import here
from safetensors.torch import load_file, save_file

from compress.models.families import layers_of
from compress.models.pretrained import load_encoder, open_model
from compress.runs.method_trainings import run_method
from compress.runs.resumable_stages import Workdir
from compress.tasks import TEXT_CLASSIFICATION
from serve.errors import BadInput, GateMissed
from serve.tasks import open_bundle
from stillroom.console import console
from stillroom.verbs.compare import Comparison, compare, training
from stillroom.verbs.compare.rows import Choice, Row

STUDENT = "layers=2,hidden=32,heads=4,ffn=32"
ASSISTANT = "layers=4,hidden=16,heads=4,ffn=32"

BESIDE: dict[str, Any] = {"task": "text-classification", "methods": ("labels",)}


RATES = (3e-3, 1e-9)  # with the second, nothing is learned


class Made(NamedTuple):
    """A finished comparison of one seed: its folder, the document that it printed, and how to give it again."""

    out: Path
    document: dict[str, Any]
    arguments: list[str | Path]
    settings: dict[str, Any]

    def again(self, out: Path, **changes: Any) -> Comparison:
        """The same comparison in `out`, a copy of its folder."""
        shutil.copytree(self.out, out)
        return Comparison(**self.settings, seeds=1, out=str(out), **changes)


@pytest.fixture(scope="module")
def made(tiny_teacher: Path, task_data: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("made") / "out"
    settings: dict[str, Any] = {
        "teacher": str(tiny_teacher), "task": "text-classification", "data": str(task_data), "corpus": (str(corpus),),
        "students": (STUDENT,), "methods": ("minilmv2",), "distill_tokens": 2_000, "task_tokens": 6_000, "batch": 8,
        "teacher_epochs": 8, "teacher_learning_rate": 3e-3, "label_learning_rates": RATES, "threads": 1,
    }  # fmt: skip
    repeated = {"students": "student", "methods": "method", "label_learning_rates": "label_learning_rate"}
    flags = [
        (f"--{repeated.get(name, name).replace('_', '-')}", str(value))
        for name, given in settings.items()
        for value in (given if isinstance(given, tuple) else (given,))
    ]
    arguments: list[str | Path] = ["compare", *(word for flag in flags for word in flag), "--out", out, "--json"]
    done = here(*arguments, "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert "4 more of the last stage, to choose its learning rate" in done.stderr
    return Made(out, json.loads(done.stdout), arguments, settings)


@pytest.mark.slow
def test_rows_are_made_once_and_told_with_what_they_cost(made: Made) -> None:
    out, document, arguments, _ = made
    first = {row["method"]: row for row in document["rows"]}
    assert set(first) == {"labels-new-layers", "labels-general-layers", "labels", "minilmv2"}
    assert document["teacher"]["value"] > 0.9
    assert all(row["standard_deviation"] is None for row in first.values())
    assert {file.name for file in out.iterdir()} == {"work", "compare.json", "report.html", "table.md"}

    # Each file is replaced in one step: who has an old one open reads all of it.
    held = {name: (out / name).read_text(encoding="utf-8") for name in ("compare.json", "table.md")}
    with ExitStack() as stack:
        opened = {name: stack.enter_context((out / name).open(encoding="utf-8")) for name in held}
        more = here(*arguments, "--seeds", "2")
        assert more.returncode == 0, more.stderr
        assert {name: file.read() for name, file in opened.items()} == held
    assert (out / "table.md").read_text(encoding="utf-8") != held["table.md"]
    assert "8 trainings, 4 of them finished earlier" in more.stderr
    document = json.loads(more.stdout)
    rows = {row["method"]: row for row in document["rows"]}
    for method, row in rows.items():
        assert len(row["values"]) == 2
        assert row["values"][:1] == first[method]["values"]
        assert row["mean"] == pytest.approx(sum(row["values"]) / 2)
        assert row["low"] <= row["mean"] <= row["high"]
        assert row["tokens"] == 6_000
        by_rate = {one["learning_rate"]: one["validation"] for one in row["label_rates"]}
        assert tuple(by_rate) == RATES
        assert by_rate[row["label_learning_rate"]] == max(by_rate.values())
        assert f"0.003: {by_rate[3e-3]:.4f}; 1e-09: {by_rate[1e-9]:.4f}" in (out / "table.md").read_text()
        assert row["choice_seconds"] > 0
        assert row["plain_tokens"] == (2_000 if method == "minilmv2" else 0)
        assert row["seconds"] > 0
        assert all("did not fall" in doubt and row["method"] in doubt for doubt in row["doubts"])
        assert row["peak_memory_bytes"] > 50e6
    # These begin with a new head, and so learn only at one of the two rates.
    for method in ("labels-new-layers", "labels-general-layers", "minilmv2"):
        assert rows[method]["label_learning_rate"] == 3e-3
    for row in rows.values():
        told = json.loads((out / row["checkpoints"][1]).with_name("row.json").read_text(encoding="utf-8"))
        assert [one["learning_rate"] for one in told["label_rates"]] == [row["label_learning_rate"]]
    assert rows["labels"]["less_labels"] is None
    less = rows["minilmv2"]["less_labels"]
    assert less["value"] == pytest.approx(rows["minilmv2"]["mean"] - rows["labels"]["mean"])
    # Equal label steps: that of the method's last stage is that of the controls.
    steps = {[*row["losses"].values()][-1]["steps"] for row in rows.values()}
    assert steps == {rows["labels"]["losses"]["1-labels"]["steps"]}
    # Every row keeps its student, which opens with a head for the task.
    for row in rows.values():
        for place in row["checkpoints"]:
            assert open_model(str(out / place)).head_for(TEXT_CLASSIFICATION) is not None
    assert list(rows["minilmv2"]["curves"]) == ["1-minilmv2", "2-labels"]
    assert [row["mean"] for row in document["rows"]] == sorted((row["mean"] for row in rows.values()), reverse=True)
    for row in document["rows"]:
        assert row["losses"].keys() == row["curves"].keys()
        assert all(told["last"][1] < told["first"][1] for told in row["losses"].values()) or row["doubts"]
    # Two seeds differ, and both are in the range.
    assert rows["labels"]["losses"]["1-labels"]["last"][0] < rows["labels"]["losses"]["1-labels"]["last"][1]
    assert "<script" not in (out / "report.html").read_text(encoding="utf-8")
    assert (out / "table.md").read_text(encoding="utf-8").count("\n") == 6


@pytest.mark.slow
def test_the_best_student_becomes_a_bundle_and_a_missed_gate_leaves_the_comparison(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = made.again(out, export="best", latency_seconds=0)
    student = out / made.document["best"]["checkpoint"] / "model.safetensors"
    weights = load_file(student)
    # A student that always gives the same answer falls short of its teacher.
    save_file({name: w * 0 if "classifier.weight" in name else w for name, w in weights.items()}, student)
    with pytest.raises(GateMissed, match=r"int8 over teacher, validation is 0\.\d+, needed 0\.97") as missed:
        compare(**vars(given))
    assert missed.value.exit_code == 3
    told = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(missed.value.document)) == told | {"report": str(out / "report.html")}
    assert told["rows"] == made.document["rows"]
    assert told["export"]["bundle"] is None
    assert (out / told["export"]["report"]).is_file()
    assert not (out / "bundle").exists()

    save_file(weights, student)
    document = compare(**vars(given))
    bundle = open_bundle(out / document["export"]["bundle"])
    assert bundle.manifest.metrics["validation"]["teacher"]["value"] == document["teacher"]["validation"]["value"]
    gates = [gate["name"] for gate in document["export"]["gates"]]
    assert gates == ["int8 over fp32, validation", "int8 over teacher, validation"]
    best = max(document["rows"], key=lambda row: row["validation"])
    assert document["best"]["checkpoint"] in best["checkpoints"]
    assert {file.name for file in out.iterdir()} == {"work", "compare.json", "report.html", "table.md", "bundle"}

    made_once = (out / "bundle" / "manifest.json").stat()
    assert compare(**vars(given))["export"] == document["export"]
    assert (out / "bundle" / "manifest.json").stat() == made_once
    with pytest.raises(BadInput, match="at these gates"):
        compare(**vars(replace(given, gate=0.5)))


@pytest.mark.slow
def test_a_stop_between_two_rates_trains_no_stage_again(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = made.again(tmp_path / "out")
    row = Row("minilmv2", STUDENT, Choice("spread", None, 2_000), 0)
    folder = tmp_path / "out" / "work" / row.name
    shutil.rmtree(folder)
    seen: list[dict[str, int]] = []
    stops = True

    def watched(workdir: Workdir, *given: Any) -> list[Path]:
        if seen and stops:
            raise KeyboardInterrupt
        stages = run_method(workdir, *given)
        seen.append({stage.name: (stage / "model.safetensors").stat().st_ino for stage in stages})
        return stages

    monkeypatch.setattr(training, "run_method", watched)
    monkeypatch.setattr(console, "quiet", False)  # which a row sets for its process
    with pytest.raises(KeyboardInterrupt):
        training.make_row(given, row, RATES, "inputs")
    stops = False
    training.make_row(given, row, RATES, "inputs")
    before, again, other = seen
    assert again == before == {"1-minilmv2": before["1-minilmv2"], "2-labels-0.003": before["2-labels-0.003"]}
    assert other.keys() == {"1-minilmv2", "2-labels-1e-09"}
    assert other["1-minilmv2"] == before["1-minilmv2"]
    # The student that was trained to choose the rate is the student of seed 0.
    assert (folder / "student" / "model.safetensors").stat().st_ino == before["2-labels-0.003"]
    assert training.rate_taken(folder) == 3e-3
    assert {path.name for path in folder.iterdir()} == {"stage.json", "row.json", "counts.npy", "student"}


@pytest.mark.slow
def test_starts_layers_and_tokens_are_compared_where_methods_read_them(made: Made, tmp_path: Path) -> None:
    given = made.again(tmp_path / "out")
    given = replace(given, starts=("spread", "last"), teacher_layers=(2, 4), distill_tokens=(2_000, 4_000))
    document = compare(**vars(given))
    told = {(r["method"], r["start"], r["teacher_layer"], r["plain_tokens"]) for r in document["rows"]}
    assert told == {
        ("labels-new-layers", None, None, 0),
        ("labels-general-layers", None, None, 0),
        *(("labels", start, None, 0) for start in given.starts),
        *(("minilmv2", s, layer, n) for s in given.starts for layer in (2, 4) for n in (2_000, 4_000)),
    }
    assert len(document["rows"]) == len(told)
    # Each is compared with the student on labels of its own start.
    labels = {row["start"]: row["mean"] for row in document["rows"] if row["method"] == "labels"}
    for row in document["rows"]:
        if row["method"] == "minilmv2":
            assert row["less_labels"]["value"] == pytest.approx(row["mean"] - labels[row["start"]])
    assert "| minilmv2 |" in (table := (tmp_path / "out" / "table.md").read_text(encoding="utf-8"))
    assert "| start | teacher layer |" in table


@pytest.mark.slow
def test_each_control_starts_from_the_layers_that_it_names(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare(
        teacher=str(tiny_teacher), out=str(out), **BESIDE, data=str(task_data), students=(STUDENT,), seeds=1, threads=1,
        batch=8, teacher_epochs=2, teacher_learning_rate=3e-3, task_tokens=300,
    )  # fmt: skip
    sources = {"given": tiny_teacher, "fine-tuned": out / "work" / "teacher"}

    def closest(control: str) -> dict[str, float]:
        """How like the most similar layer of each teacher the student's last layer is: 1 where it was copied and hardly trained."""
        row = next(iter((out / "work").glob(f"{control}-layers*")))
        ours = queries(row / "student")[-1]
        return {name: max(float(cosine(ours, theirs)) for theirs in queries(f)) for name, f in sources.items()}

    new, general, tuned = map(closest, ("labels-new-layers", "labels-general-layers", "labels"))
    assert max(new.values()) < 0.2
    assert general["given"] > 0.99 > general["fine-tuned"]
    assert tuned["fine-tuned"] > 0.99 > tuned["given"]


def queries(folder: Path) -> list[torch.Tensor]:
    """The query matrix of each layer of a checkpoint, first to last."""
    encoder = load_encoder(folder, seed=0)
    return [layer.attention.self.query.weight.detach() for layer in layers_of(encoder)]  # type: ignore[union-attr]


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0)


@pytest.mark.slow
def test_assistants_and_another_task_come_before_the_task(
    tiny_teacher: Path, task_data: Path, corpus: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    kept = [json.loads(line) for line in (task_data / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    for split in ("train", "validation", "test"):
        lines = (task_data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines] + (kept if split == "train" else [])
        told = ({"text": r["text"], "label": "asks" if "please" in r["text"] else "tells"} for r in rows)
        (source / f"{split}.jsonl").write_text("\n".join(map(json.dumps, told)), encoding="utf-8")
    document = compare(
        teacher=str(tiny_teacher), task="text-classification", data=str(task_data), out=str(tmp_path / "out"),
        methods=(f"minilm@{ASSISTANT}", "xtremedistil-transfer"), students=(STUDENT,), corpus=(str(corpus),), source_data=str(source),
        seeds=1, distill_tokens=2_000, task_tokens=22_000, batch=8, teacher_epochs=6, teacher_learning_rate=3e-3, threads=1,
    )  # fmt: skip
    rows = {row["method"].partition("@")[0]: row for row in document["rows"]}
    assert sorted(rows["minilm"]["curves"]) == ["1-minilm", "2-labels", "assistant-1-1-minilm"]
    stages = ["1-representations", "2-logits-head", "3-logits", "4-labels-head", "5-labels", "6-labels"]
    assert sorted(rows["xtremedistil-transfer"]["curves"]) == stages
    curves = rows["xtremedistil-transfer"]["curves"]
    assert curves["5-labels"]["validation"][-1][1] > 0.9  # of the source task
    # A head of the task's own three classes comes in place of the source's two: it knows nothing yet, then learns.
    losses = [value for _, value in curves["6-labels"]["loss"]]
    assert losses[0] == pytest.approx(math.log(3), abs=0.1)
    assert losses[-1] < losses[0] - 0.1
    # The transfer reads as many tokens of the source task on top of those of the task.
    assert {method: row["tokens"] for method, row in rows.items()} == dict.fromkeys(rows, 22_000) | {
        "xtremedistil-transfer": 44_000
    }
    for name in ("teacher", "teacher-source"):
        lineage = json.loads((tmp_path / "out" / "work" / name / "lineage.json").read_text(encoding="utf-8"))
        assert lineage["best_step"] > 0


@pytest.mark.slow
def test_a_rate_whose_loss_is_not_finite_is_out(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = replace(made.again(tmp_path / "out"), methods=("labels",), label_learning_rates=(3e-3, 1e30))
    rows = compare(**vars(given))["rows"]
    assert [(row["label_learning_rate"], row["diverged_rates"]) for row in rows] == [(3e-3, [1e30])] * 3
    assert [len(row["label_rates"]) for row in rows] == [1] * 3
    assert "1e+30: the loss was not finite" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    monkeypatch.setattr(console, "quiet", False)  # which a row sets for its process
    with pytest.raises(BadInput, match="The loss became"):
        training.make_row(given, Row("labels", STUDENT, Choice("spread", None, None), 0), (1e29, 1e30), "other rates")


def test_a_teacher_or_other_things_that_the_comparison_would_write_over_are_left_alone(
    tiny_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    inside = shutil.copytree(tiny_teacher, tmp_path / "out" / "work" / "teacher")
    with pytest.raises(BadInput, match="where this comparison writes"):
        compare(teacher=str(inside), **BESIDE, data=str(task_data), out=str(tmp_path / "out"))
    assert (inside / "model.safetensors").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(BadInput, match="holds other files"):
        compare(teacher=str(tiny_teacher), **BESIDE, data=str(task_data), out=str(tmp_path / "other"))
