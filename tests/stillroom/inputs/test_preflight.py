"""What a run may train on."""

from dataclasses import fields
from pathlib import Path

import pytest
from small_task import write_rows

from compress.runs.hardware import ADDED_VARIABLE, on_this_machine
from serve.bundle.cpu import HIDDEN_VARIABLE, cpu_features
from serve.errors import BadInput
from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import Recipe, write_recipe

NEEDED = {"teacher": "t", "task": "text-classification", "data": "d", "out": "o"}


def sentence(start: str, city: str) -> dict[str, object]:
    text = f"{start} {city}"
    return {"text": text, "entities": [{"start": len(start) + 1, "end": len(text), "label": "city"}]}


@pytest.mark.parametrize(
    ("hidden", "added", "precision"),
    [
        pytest.param("", "amx_bf16", "bf16", id="with AMX"),
        pytest.param("amx_bf16", "", "fp32", id="without, whatever else it has"),
        pytest.param("amx_bf16,amx_int8", "amx_bf16", "fp32", id="hidden"),
    ],
)
def test_bfloat16_is_for_processors_that_are_faster_in_it(
    monkeypatch: pytest.MonkeyPatch, hidden: str, added: str, precision: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(HIDDEN_VARIABLE, hidden)
    monkeypatch.setenv(ADDED_VARIABLE, added)
    assert on_this_machine(Recipe(**NEEDED, precision="auto")).precision == precision
    assert on_this_machine(Recipe(**NEEDED, precision="bf16")).precision == "bf16"
    assert on_this_machine(Recipe(**NEEDED, precision="fp32")).precision == "fp32"


def test_only_the_choice_of_precision_takes_a_feature_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_features()
    monkeypatch.setenv(ADDED_VARIABLE, "amx_bf16")
    assert cpu_features() == before  # which files are served
    monkeypatch.setenv(ADDED_VARIABLE, "avx512_vnni")
    with pytest.raises(BadInput, match="STILLROOM_ADD_CPU_FEATURES is 'avx512_vnni'; only amx_bf16 can be added"):
        on_this_machine(Recipe(**NEEDED, device="cpu"))


def test_no_generated_text_is_one_of_validation_or_test(tiny_teacher: Path, tmp_path: Path) -> None:
    starts, cities = ["send it to", "we live in"], ["Oslo", "Lisbon", "Ghent"]
    write_rows(
        tmp_path / "train.jsonl", [sentence("send it to", city) for city in cities] + [sentence("we live in", "Oslo")]
    )
    write_rows(tmp_path / "validation.jsonl", [sentence("we live in", "Lisbon")])
    write_rows(tmp_path / "test.jsonl", [sentence("we live in", "Ghent")])
    given = {"teacher": str(tiny_teacher), "task": "token-classification", "data": str(tmp_path), "out": "out"}
    recipe = Recipe(**given, student="layers=2,hidden=32,heads=4,ffn=32", augment=200)
    generated = prepare(recipe).in_domain
    assert generated is not None
    assert len(generated) > 4
    assert all(any(part in text for part in (*cities, "[MASK]")) for text in generated.texts)
    assert not {f"{start} {city}" for start in starts for city in cities} & set(generated.texts)


def test_promises_are_made_on_a_quarter_of_validation_or_without_confidence(tiny_teacher: Path, tmp_path: Path) -> None:
    rows = [{"text": f"send it to the {i}th town", "label": "yes" if i % 2 else "no"} for i in range(900)]
    write_rows(tmp_path / "train.jsonl", rows[:50])
    write_rows(tmp_path / "test.jsonl", rows[50:60])
    given = {"teacher": str(tiny_teacher), "task": "text-classification", "data": str(tmp_path), "out": "out"}
    given |= {"student": "layers=2,hidden=32,heads=4,ffn=32"}
    write_rows(tmp_path / "validation.jsonl", rows[100:500])
    (tmp_path / "more.txt").write_text("\n".join(str(row["text"]).upper() for row in rows[100:520]), encoding="utf-8")
    inputs = prepare(Recipe(**given, promises=("precision=0.9",), unlabelled=(str(tmp_path / "more.txt"),)))
    apart = inputs.promise_split()
    assert apart is not None
    assert (len(inputs.splits.validation), len(apart.examples), len(inputs.validation)) == (300, 100, 300)
    assert len(inputs.unlabelled) == 20  # neither texts of validation nor those apart
    assert any("100 texts of validation are set apart for promises" in each for each in inputs.warnings)
    assert len(prepare(Recipe(**given)).splits.validation) == 400
    write_rows(tmp_path / "validation.jsonl", rows[100:400])
    few = prepare(Recipe(**given, promises=("precision=0.9",)))
    assert few.promise_split() is None
    assert any("--promise has no confidence: chosen on the same texts" in each for each in few.warnings)
    with pytest.raises(BadInput, match=r"precision=0\.995 .* takes 598 right answers at least, and validation has 300"):
        prepare(Recipe(**given, promises=("precision=0.995",)))


def test_a_recipe_begins_with_what_a_run_cannot_do_without() -> None:
    lines = write_recipe(Recipe(**NEEDED)).splitlines()
    names = [line.split(" ")[0] for line in lines]
    assert names[:6] == ["teacher", "task", "data", "out", "student", "name"]
    assert len(names) == len(set(names))
    # What was left to stillroom stays out.
    left = {"teacher_epochs", "student_epochs", "soft_weight", "budget_ms", "stages"}
    assert {each.name for each in fields(Recipe)} - set(names) == left
