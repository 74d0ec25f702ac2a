"""What is read of a model while it runs, and what it runs in."""

import pytest
import torch
from encoders import encoder, inputs

from compress.models.activations import Part, read
from compress.models.families import FAMILIES, encoder_of, layers_of
from compress.models.precision import autocast, own_precision, weights_in
from serve.errors import BadInput

HEADS = ("", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")


@pytest.mark.parametrize("kind", sorted(FAMILIES))
@pytest.mark.parametrize("head", HEADS)
def test_hidden_states_are_those_that_the_model_says_it_has(kind: str, head: str) -> None:
    model, given = encoder(kind, head), inputs()
    with torch.no_grad():
        said = encoder_of(model)(**given, output_hidden_states=True)
        found = read(model, given, [Part("hidden", layer) for layer in range(5)])
    for layer in range(4):
        torch.testing.assert_close(found["hidden", layer], said.hidden_states[layer])
    torch.testing.assert_close(found["hidden", 4], said.last_hidden_state)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_and_values_give_the_attention_that_the_model_computes(kind: str, attention: str) -> None:
    model, given = encoder(kind, attention=attention), inputs()
    told = encoder(kind, attention="eager")
    wanted = [Part(of, layer) for layer in range(1, 5) for of in ("scores", "queries", "values")]
    with torch.no_grad():
        said = told(**given, output_attentions=True).attentions
        found = read(model, given, wanted)
    real = given["attention_mask"].bool()
    for layer in range(1, 5):
        scores = found.scores[layer].scores().masked_fill(~real[:, None, None, :], float("-inf"))
        ours, theirs = scores.softmax(-1).transpose(1, 2)[real], said[layer - 1].transpose(1, 2)[real]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert found["values", layer].shape == found["queries", layer].shape == (3, 9, 24)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_reading_stops_where_nothing_more_is_wanted(kind: str) -> None:
    model, given = encoder(kind), inputs()
    ran: list[int] = []
    for number, layer in enumerate(layers_of(model), 1):
        layer.register_forward_hook(lambda _m, _i, _o, number=number: ran.append(number))
    read(model, given, [Part("values", 2), Part("hidden", 0)])
    assert ran == [1]
    ran.clear()
    read(model, given, [Part("values", 2)], output=True)
    assert ran == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_an_answer_comes_with_what_was_read_and_leaves_the_model_as_it_was(kind: str) -> None:
    model, given = encoder(kind, "ForTokenClassification"), inputs()
    with torch.no_grad():
        plain = model(**given).logits
        found = read(model, given, [Part("keys", 3)], output=True)
    assert torch.equal(found.output.logits, plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_gradients_flow_back_from_every_part(kind: str) -> None:
    model, given = encoder(kind), inputs()
    for of in ("hidden", "queries", "keys", "values", "scores"):
        model.zero_grad()
        found = read(model, given, [Part(of, 3)])
        value = found.scores[3].scores() if of == "scores" else found[of, 3]
        value.square().sum().backward()
        assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_a_layer_that_is_not_there_is_refused_by_its_number() -> None:
    with pytest.raises(BadInput, match="Layer 5 has no scores to read"):
        read(encoder("bert"), inputs(), [Part("scores", 5)])
    with pytest.raises(BadInput, match="Layer 0 has no queries to read"):
        read(encoder("bert"), inputs(), [Part("queries", 0)])


CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_matrices_held_in_half_compute_the_same_bits_and_come_back(kind: str) -> None:
    model = encoder(kind, "ForMaskedLM")  # whose last matrix is an embedding too
    given, before = inputs(), {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad(), autocast(CPU, "bf16"):
        expected = model(**given).logits
    with weights_in(model, "bf16"):
        held = {module.weight.dtype for module in model.modules() if isinstance(module, torch.nn.Linear)}
        assert torch.bfloat16 in held
        assert model.get_input_embeddings().weight.dtype == torch.float32
        with torch.no_grad(), autocast(CPU, "bf16"):
            assert torch.equal(model(**given).logits, expected)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(
        torch.equal(after[name], weight) and after[name].dtype == weight.dtype for name, weight in before.items()
    )
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_in_float32_nothing_is_touched() -> None:
    model = encoder("bert")
    weights = [id(parameter) for parameter in model.parameters()]
    with weights_in(model, "fp32"):
        assert [id(parameter) for parameter in model.parameters()] == weights


def test_only_a_model_wholly_in_half_precision_leaves_autocast() -> None:
    """On a GPU it would normalise and sum in float32."""
    model, given = encoder("bert"), inputs()
    with torch.no_grad(), autocast(CPU, "bf16"):
        with own_precision(model):
            assert torch.is_autocast_enabled("cpu")
        model.bfloat16()
        with own_precision(model):
            assert not torch.is_autocast_enabled("cpu")
            assert model(**given).last_hidden_state.dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
