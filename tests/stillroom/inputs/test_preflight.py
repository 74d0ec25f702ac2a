"""What a run may train on."""

from pathlib import Path

from small_task import write_rows

from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import Recipe


def sentence(start: str, city: str) -> dict[str, object]:
    text = f"{start} {city}"
    return {"text": text, "entities": [{"start": len(start) + 1, "end": len(text), "label": "city"}]}


def test_no_generated_text_is_one_of_validation_or_test(tiny_teacher: Path, tmp_path: Path) -> None:
    starts, cities = ["send it to", "we live in"], ["Oslo", "Lisbon", "Ghent"]
    write_rows(
        tmp_path / "train.jsonl", [sentence("send it to", city) for city in cities] + [sentence("we live in", "Oslo")]
    )
    write_rows(tmp_path / "validation.jsonl", [sentence("we live in", "Lisbon")])
    write_rows(tmp_path / "test.jsonl", [sentence("we live in", "Ghent")])
    recipe = Recipe(
        teacher=str(tiny_teacher),
        task="token-classification",
        data=str(tmp_path),
        out=str(tmp_path / "out"),
        student="layers=2,hidden=32,heads=4,ffn=32",
        augment=200,
    )
    generated = prepare(recipe).in_domain
    assert generated is not None
    assert len(generated) > 4
    assert all(any(part in text for part in (*cities, "[MASK]")) for text in generated.texts)
    assert not {f"{start} {city}" for start in starts for city in cities} & set(generated.texts)
