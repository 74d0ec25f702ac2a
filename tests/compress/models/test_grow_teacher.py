import copy

import pytest
import torch
from encoders import encoder, inputs

from benchmarks.distill.grow import GROWABLE, grown
from compress.models.activations import Part, read
from compress.models.families import FAMILIES, layers_of
from serve.errors import BadInput


def trained_like(kind: str):
    """A tiny encoder whose LayerNorms are not as they were made, as those of a trained one are not."""
    model = encoder(kind)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm.weight" in name:
                parameter.copy_(0.8 + 0.1 * torch.randn(parameter.shape, generator=generator))
            elif "LayerNorm.bias" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 2:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("kind", GROWABLE)
def test_the_first_layer_says_twice_what_it_said(kind: str) -> None:
    model, given = trained_like(kind), inputs()
    larger = grown(model, FAMILIES[kind])
    real = given["attention_mask"].bool()
    with torch.no_grad():
        wanted = [Part("hidden", 0), Part("hidden", 1), Part("scores", 1)]
        before, after = (read(m, given, wanted) for m in (model, larger))
    for layer in (0, 1):
        twice = before["hidden", layer].repeat_interleave(2, dim=-1)
        torch.testing.assert_close(after["hidden", layer][real], twice[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.scores[1].scores(), before.scores[1].scores(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", GROWABLE)
def test_the_last_layer_says_nearly_what_it_said(kind: str) -> None:
    model, given = trained_like(kind), inputs()
    larger = grown(model, FAMILIES[kind])
    assert len(layers_of(larger)) == 8
    assert larger.config.hidden_size == 48
    real = given["attention_mask"].bool()
    with torch.no_grad():
        before = model(**given).last_hidden_state[real].repeat_interleave(2, dim=-1)
        after = larger(**given).last_hidden_state[real]
    assert torch.nn.functional.cosine_similarity(before, after, dim=-1).min() > 0.98


@pytest.mark.parametrize("kind", GROWABLE)
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_a_head_reads_doubled_units_as_it_read_single_ones(kind: str, head: str) -> None:
    model, given = encoder(kind, head), inputs()
    larger = grown(model, FAMILIES[kind])
    assert larger.config.num_labels == model.config.num_labels
    hidden = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    twice = hidden.repeat_interleave(2, dim=-1)
    with torch.no_grad():
        if kind == "bert" and head == "ForSequenceClassification":
            hidden, twice = model.bert.pooler(hidden), larger.bert.pooler(twice)
        torch.testing.assert_close(larger.classifier(twice), model.classifier(hidden), rtol=1e-4, atol=1e-5)
        assert larger(**given).logits.shape == model(**given).logits.shape


def test_the_smaller_one_stays_as_it_was_and_others_are_refused() -> None:
    model = encoder("bert")
    kept = copy.deepcopy(model.state_dict())
    grown(model, FAMILIES["bert"])
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    with pytest.raises(BadInput, match="distilbert model with this head cannot be grown"):
        grown(encoder("distilbert"), FAMILIES["distilbert"])
    with pytest.raises(BadInput, match="cannot be grown"):
        grown(encoder("bert", "ForMaskedLM"), FAMILIES["bert"])
