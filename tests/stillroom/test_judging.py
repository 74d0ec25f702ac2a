"""What the stages that judge make of a student."""

from pathlib import Path

from small_task import examples, make_teacher, write_rows

from compress.checkpoint import Progress
from compress.teacher import load
from stillroom.ground import prepare
from stillroom.judging import make_export, read_json
from stillroom.recipe import Recipe
from stillroom.training import save


def test_a_student_that_finds_nothing_is_exported_and_left_to_the_gates(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        write_rows(tmp_path / f"{name}.jsonl", examples(8, seed=0))
    ground = prepare(
        Recipe(
            teacher=str(make_teacher(tmp_path / "teacher", num_hidden_layers=1)),
            task="token-classification",
            data=str(tmp_path),
            out=str(tmp_path / "out"),
            student="layers=1,hidden=32,heads=4,ffn=32",
            threads=1,
        )
    )
    model = load(ground.opened, "token-classification", ground.labels)
    model.classifier.bias.data[0] = 100  # it says "outside" of every word
    save(model, tmp_path / "student", ground, Progress(validation=[(1, 0.0)]), {"role": "student", "method": "labels"})
    make_export(tmp_path, ground, tmp_path / "student", tmp_path / "student")
    made = read_json(tmp_path / "export.json")
    assert (made["validation"]["fp32"]["value"], made["faults"], made["search"]["repaired"]) == (0, [], [])
