"""The verbs as functions."""

import pytest

import stillroom
from serve.errors import BadInput
from stillroom.inputs.recipe import Recipe, write_recipe


@pytest.mark.parametrize("setting", ["progress", "nonsense"])
def test_what_is_no_setting_is_named_before_any_work(setting: str) -> None:
    with pytest.raises(
        BadInput, match=f"^{setting} is no setting; the settings are .*layer_map, learning_rate, method"
    ):
        stillroom.distill("teacher", ["corpus.txt"], "out", **{setting: 1})
    with pytest.raises(BadInput, match=f"^{setting} is no setting; the settings are .*data, data_revision"):
        stillroom.finetune("model", "text-classification", "data", "out", **{setting: 1})


def test_a_recipe_begins_with_what_a_run_cannot_do_without() -> None:
    lines = write_recipe(Recipe(teacher="t", task="text-classification", data="d", out="o")).splitlines()
    assert [line.split(" ")[0] for line in lines[:6]] == ["teacher", "task", "data", "out", "student", "name"]
    assert len(lines) == len(set(lines)) == len(Recipe.__dataclass_fields__)
