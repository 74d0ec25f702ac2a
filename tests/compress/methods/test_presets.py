"""The papers' schedules: their numbers, and the rates that they give."""

import pytest

from compress.methods.presets import PRESETS, preset_of
from serve.errors import BadInput


@pytest.mark.parametrize(
    ("name", "batch", "tokens", "rate", "length", "beta"),
    [
        # MiniLM (long version), section 4.1: length in steps.
        ("minilm", 256, 512, 3e-4, 400_000, 0.999),
        ("minilm-6x768", 1024, 512, 5e-4, 400_000, 0.999),
        ("minilm-own-teacher-12x384", 2048, 512, 6e-4, 400_000, 0.98),
        ("minilm-own-teacher-6x384", 512, 512, 4e-4, 400_000, 0.98),
        ("minilm-multilingual-12x384", 256, 512, 3e-4, 1_000_000, 0.999),
        ("minilm-multilingual-6x384", 512, 512, 6e-4, 400_000, 0.999),
        # Comparative analysis, appendix B: length in epochs.
        ("minilmv2", 32, 256, 5e-4, 7, 0.98),
        ("minilmv2-multilingual", 32, 256, 8e-4, 7, 0.98),
        ("hidden-states", 32, 256, 5e-4, 7, 0.98),
        ("output-distribution", 32, 256, 3e-4, 3, 0.98),
        # MiniLM, appendix B.
        ("glue", 32, 128, 2e-5, 3, 0.999),
        ("glue-small", 32, 128, 2e-5, 10, 0.999),
        ("squad2", 32, 384, 6e-5, 3, 0.999),
        ("xnli", 128, 128, 3e-5, 5, 0.999),
        ("mlqa", 32, 512, 3e-5, 3, 0.999),
        # MiniLM, appendix, students of six layers.
        ("question-generation", 32, 512, 8e-5, 25, 0.999),
        ("xsum", 64, 512, 1.5e-4, 50, 0.999),
        # Comparative analysis, appendix D.
        ("compared-glue", 32, 128, 2e-5, 3, 0.999),
        ("compared-cola", 32, 128, 2e-5, 6, 0.999),
        ("compared-xnli", 32, 128, 2e-5, 5, 0.999),
    ],
)
def test_a_preset_trains_as_the_paper_did(
    name: str, batch: int, tokens: int, rate: float, length: int, beta: float
) -> None:
    preset = preset_of(name, PRESETS[name].use)
    assert (preset.batch, preset.tokens, preset.betas, preset.weight_decay) == (batch, tokens, (0.9, beta), 0.01)
    schedule = preset.schedule(steps_per_epoch=1_000)
    assert schedule.steps == (length if length >= 100 else 1_000 * length)
    assert max(schedule.rate(step) for step in range(schedule.steps // 10)) == pytest.approx(rate)
    assert (schedule.betas, schedule.weight_decay) == (preset.betas, 0.01)


def test_every_preset_is_held_against_its_paper() -> None:
    mark = test_a_preset_trains_as_the_paper_did.pytestmark[0]
    assert {row[0] for row in mark.args[1]} == set(PRESETS)


def test_warm_up_lasts_as_long_as_the_paper_says() -> None:
    minilm, compared = PRESETS["minilm"].schedule(1), PRESETS["hidden-states"].schedule(1_000)
    assert minilm.rate(3_999) == 3e-4
    assert minilm.rate(1_999) == pytest.approx(1.5e-4)
    assert minilm.rate(202_000) == pytest.approx(1.5e-4)
    assert compared.rate(349) == 5e-4  # 5 % of 7,000
    assert compared.rate(348) < 5e-4


def test_an_unknown_schedule_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        BadInput, match=r"minilm3 is not a schedule of distillation\. Give one of minilm, minilm-6x768,"
    ):
        preset_of("minilm3", "distillation")
    with pytest.raises(BadInput, match=r"minilm is not a schedule of fine-tuning\. Give one of glue,"):
        preset_of("minilm", "fine-tuning")
