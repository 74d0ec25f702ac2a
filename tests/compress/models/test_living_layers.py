"""Which layers change what they get, and how alike the two copies of a grown unit are."""

import pytest
import torch
from encoders import encoder, inputs

from benchmarks.distill.grow import grown, twin_correlation
from compress.models.activations import Part, active_layers, nearest_living, read, relative_changes
from compress.models.families import FAMILIES, layers_of, linear


def strong(kind: str, head: str = ""):
    """A tiny encoder whose branches weigh as much beside their input as those of a trained one."""
    model = encoder(kind, head)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(8)
    return model


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_layer_of_an_untouched_model_lives(kind: str) -> None:
    assert active_layers(relative_changes(strong(kind), inputs())) == (1, 2, 3, 4)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_the_layers_that_growing_adds_do_not_live(kind: str) -> None:
    model = strong(kind)
    assert active_layers(relative_changes(grown(model, FAMILIES[kind]), inputs())) == (1, 3, 5, 7)
    begun = relative_changes(grown(model, FAMILIES[kind], branch=0.5), inputs())
    assert active_layers(begun) == (1, 2, 3, 4, 5, 6, 7, 8)


def test_a_layer_that_only_rescales_does_not_live() -> None:
    model, bert = strong("bert"), FAMILIES["bert"]
    second = layers_of(model)[1]
    with torch.no_grad():
        for path in (bert.attention_output, bert.ffn_out):
            linear(second, path).weight.zero_()
        second.output.LayerNorm.weight.fill_(3.0)  # type: ignore[union-attr, operator]
    assert active_layers(relative_changes(model, inputs())) == (1, 3, 4)
    assert relative_changes(model, inputs(), rescaled=False)[1] > 1


def test_padding_does_not_count() -> None:
    model, given = strong("bert"), inputs()
    longer = {name: torch.nn.functional.pad(value, (0, 7)) for name, value in given.items()}
    assert relative_changes(model, longer) == pytest.approx(relative_changes(model, given), rel=1e-4)


def test_the_nearest_living_layer_is_the_lower_of_two() -> None:
    changes = [0.5, 0.02, 0.4, 0.01, 0.03]
    assert [nearest_living(layer, changes) for layer in range(1, 6)] == [1, 1, 3, 3, 3]
    assert nearest_living(2, [0.01, 0.02]) == 2  # none lives


def test_noise_parts_twins_and_leaves_the_function_near() -> None:
    model, bert, given = strong("bert"), FAMILIES["bert"], inputs()
    copies, parted = grown(model, bert), grown(model, bert, noise=0.1)
    assert twin_correlation(copies, given) == pytest.approx(dict.fromkeys(("hidden", *QKV), 1.0))
    alike = twin_correlation(parted, given)
    assert all(0.9 < alike[of] < 0.999 for of in ("hidden", *QKV))
    assert twin_correlation(model, given)["hidden"] < 0.5  # neighbours that are no twins
    real, last = given["attention_mask"].bool(), Part("hidden", 8)
    before, after = (read(m, given, [last])[last][real] for m in (copies, parted))
    assert torch.nn.functional.cosine_similarity(before, after, dim=-1).min() > 0.9
    again, other = grown(model, bert, noise=0.1), grown(model, bert, noise=0.1, seed=1)
    ours, same, differs = (m.state_dict()["encoder.layer.0.output.dense.weight"] for m in (parted, again, other))
    assert torch.equal(ours, same)
    assert not torch.equal(ours, differs)


QKV = ("queries", "keys", "values")
