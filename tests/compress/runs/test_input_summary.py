"""What a run and a fine-tuning say of their inputs before they train, and of what they made at the end."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_task import examples, ratings, relations, with_label_lists, write_rows

import compress
from compress.progress import Event
from compress.runs.distill import distill_result
from compress.runs.finetune import finetune_result, result_line
from compress.runs.input_summary import input_summary, summary_lines
from compress.runs.open_task import open_task
from compress.runs.task_inputs import TaskInputs
from compress.settings import TaskSettings
from serve.errors import BadInput
from stillroom.inputs.recipe import Recipe
from stillroom.verbs.run.pipeline import plan_of, run

SHAPE = "layers=2,hidden=32,heads=4,ffn=32"
TAGS = ["O", "B-item", "I-item", "B-city", "I-city", "B-colour", "I-colour", "B-name", "I-name"]


def folder_of(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir()
    write_rows(folder / "train.jsonl", rows[:-4])
    write_rows(folder / "test.jsonl", rows[-4:])
    return folder


def opened(teacher: Path, task: str, data: Path, **settings: Any) -> TaskInputs:
    settings = {"student": SHAPE} | settings
    return open_task(TaskSettings(teacher=str(teacher), task=task, data=str(data), **settings), data / "out")


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path) -> Path:
    """A teacher with a head for four kinds of entities, of which the task has two."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("taggers") / "tagger"
    labels = dict(enumerate(TAGS))
    AutoModelForTokenClassification.from_pretrained(
        tiny_teacher, id2label=labels, label2id={v: k for k, v in labels.items()}
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_teacher).save_pretrained(folder)
    return folder


def test_the_kind_of_labels_is_told(tiny_teacher: Path, tmp_path: Path) -> None:
    rows = examples(20, 0)
    pairs = [{"text": row["text"], "text_pair": "about an order", "label": row["label"]} for row in rows]
    kinds = {
        "single": ("text-classification", rows, "single label"),
        "several": ("text-classification", with_label_lists(rows), "multi-label"),
        "pairs": ("text-classification", pairs, "single label, text pairs"),
        "relations": ("text-classification", relations(20, 0), "single label, relations"),
        "numbers": ("text-regression", ratings(20, 0), "a number"),
        "entities": ("token-classification", rows, "entities, BIO"),
    }
    for name, (task, given, kind) in kinds.items():
        found = input_summary(opened(tiny_teacher, task, folder_of(tmp_path / name, given)))
        assert found["kind"] == kind
        assert summary_lines(found)[0].startswith(f"task: {task} ({kind}), scored by ")
        assert json.loads(json.dumps(found)) == found


def line_of(found: dict[str, Any], name: str) -> str:
    """The only line that begins with `name`, without it."""
    (line,) = (line for line in summary_lines(found) if line.startswith(f"{name}: "))
    return line.removeprefix(f"{name}: ")


def test_rows_labels_and_what_is_trained_are_told_in_a_few_lines(tiny_teacher: Path, task_data: Path) -> None:
    found = input_summary(opened(tiny_teacher, "text-classification", task_data), {"teacher": 40, "student": 1200})
    assert found["rows"] == {"train": 240, "validation": 40, "test": 60}
    assert sum(found["labels"].values()) == 240
    counts = list(found["labels"].values())
    assert counts == sorted(counts, reverse=True)
    labels = ", ".join(f"{name} {count}" for name, count in found["labels"].items())
    assert line_of(found, "texts") == "240 in train, 40 in validation, 60 in test, read up to 64 tokens"
    assert line_of(found, "labels") == f"3 in train: {labels}"
    assert line_of(found, "student") == SHAPE
    assert line_of(found, "steps at most") == "teacher 40, student 1,200"
    assert len(summary_lines(found)) == 7


@pytest.mark.parametrize(
    ("given", "method", "why"),
    [
        ({"student": "layers=2,hidden=16,heads=4,ffn=32"}, "soft-labels", "layers are new; with --corpus"),
        (
            {"student": "layers=2,hidden=16,heads=4,ffn=32", "unlabelled": ()},
            "soft-labels",
            "layers are new; with --corpus",
        ),
        ({"student": "layers=2,hidden=16,heads=4,ffn=32", "corpus": ()}, "minilmv2", "layers are new, and there is a"),
        ({"unlabelled": ()}, "soft-labels", "starts from the teacher's layers"),
        ({"method": "minilm"}, "minilm", ""),
    ],
)
def test_the_method_that_auto_takes_is_told_with_its_reason(
    given: dict[str, Any], method: str, why: str, tiny_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    text = tmp_path / "more.txt"
    text.write_text("where is the lamp\n", encoding="utf-8")
    given = {name: value or (str(text),) for name, value in given.items()}
    told = line_of(input_summary(opened(tiny_teacher, "text-classification", task_data, **given)), "method")
    assert told.split(" ")[0] == method
    assert why in told
    assert ("(auto: " in told) == bool(why)


def test_of_many_labels_the_most_and_the_least_frequent_are_told(tiny_teacher: Path, tmp_path: Path) -> None:
    places = [(i, k) for i in range(30) for k in range(30 - i)]
    rows: list[dict[str, object]] = [{"text": f"text {i} {k}", "label": f"label-{i:02}"} for i, k in places]
    data = folder_of(tmp_path / "many", [*rows, *rows[:4]])
    found = input_summary(opened(tiny_teacher, "text-classification", data, seed=1))
    line = line_of(found, "labels")
    assert line.startswith("30 in train; most frequent label-00 ")
    assert line.count("label-") == 6
    assert len(found["labels"]) == 30


def test_a_head_of_the_teachers_own_is_told_with_the_labels_that_occur(tagger: Path, task_data: Path) -> None:
    found = input_summary(opened(tagger, "token-classification", task_data))
    assert line_of(found, "head").endswith("4 labels, of which 2 occur in the data: city, item")
    assert found["head"]["own_labels"] == ["city", "colour", "item", "name"]
    anew = input_summary(opened(tagger, "token-classification", task_data, new_head=True))
    assert line_of(anew, "head").startswith("tagger gets a new head for 2 labels")


def test_texts_out_of_scope_are_distinguishable(tiny_teacher: Path, task_data: Path) -> None:
    inputs = opened(tiny_teacher, "text-classification", task_data, out_of_scope="praise")
    found = input_summary(inputs)
    assert set(found["labels"]) == {"refund", "status"}
    assert line_of(found, "out of scope") == ", ".join(f"{n} in {s}" for s, n in found["rows_out_of_scope"].items())


def test_run_and_plan_begin_with_their_inputs(
    tagger: Path, task_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe: dict[str, Any] = {
        "teacher": str(tagger), "task": "token-classification", "data": str(task_data), "out": str(tmp_path / "out"),
        "student": SHAPE, "batch": 8,
    }  # fmt: skip
    plan = plan_of(Recipe(**recipe))
    first = "task: token-classification (entities, BIO), scored by entity_f1"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == first
    assert f"steps at most: student {plan.student_steps:,}" in lines
    assert plan.understood["head"]["own_labels_in_data"] == ["city", "item"]
    with pytest.raises(BadInput, match=r"--max-minutes is 0\.01"):
        run(Recipe(**recipe, max_minutes=0.01))
    assert capsys.readouterr().err.splitlines()[0] == first


def test_finetune_tells_its_inputs_and_its_score(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    heard: list[str] = []

    def hear(event: Event) -> None:
        if event.kind == "message":
            heard.append(event.text)

    settings: dict[str, Any] = {"epochs": 0.5, "batch": 16, "progress": hear}
    made = compress.finetune(str(tiny_teacher), "text-classification", str(task_data), tmp_path / "tuned", **settings)
    assert heard[0] == "task: text-classification (single label), scored by accuracy"
    assert "head: tiny gets a new head for 3 labels" in heard
    assert "steps at most: fine-tuning 8" in heard
    result = finetune_result(made)
    looks = dict(json.loads((made / "lineage.json").read_text(encoding="utf-8"))["validation"])
    assert result["value"] == max(looks.values())
    assert (result["checkpoint"], result["metric"], result["examples"]) == (str(made), "accuracy", 40)
    assert (result["step"], result["steps"]) == (8, 8)
    assert result_line(result) == f"validation: accuracy {result['value']:.4f} on 40 texts, best after 8 of 8 steps"


def test_a_distillation_says_what_it_made(tiny_teacher: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("please refund the lamp\nthank you team\n" * 20, encoding="utf-8")
    made = compress.distill(str(tiny_teacher), [corpus], tmp_path / "small", student=SHAPE, batch=8, pack=False)
    result = distill_result(made)
    assert result.pop("loss") > 0
    assert result == {
        "checkpoint": str(made), "student": SHAPE, "method": "minilmv2", "teacher": "tiny", "epochs": 1.0, "steps": 5,
    }  # fmt: skip


def test_a_method_that_is_not_is_told_among_the_other_faults(tmp_path: Path) -> None:
    for method, said in (("minlm", "--method minlm is not known"), ("minilm@6x57", "'6x57' is not known")):
        with pytest.raises(BadInput) as refused:
            opened(tmp_path / "nowhere", "text-classification", tmp_path / "nodata", method=method)
        assert "3 faults were found" in refused.value.message
        assert said in refused.value.message
