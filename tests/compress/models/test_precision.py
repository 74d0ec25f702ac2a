import pytest
import torch
from encoders import encoder, inputs

from compress.models.families import FAMILIES
from compress.models.precision import autocast, own_precision, weights_in

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
