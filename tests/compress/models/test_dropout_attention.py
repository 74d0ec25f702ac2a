"""Attention in tiles against torch's own, which knows the same draws of dropout only where there are none."""

import pytest
import torch
from encoders import encoder, inputs
from torch.nn import functional

from compress.models import dropout_attention as attention_module
from compress.models.dropout_attention import TiledAttention, dropout_attention
from compress.models.families import FAMILIES

NEVER = 1e-9  # less than one draw of all


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "NUMBERS", 40)
    monkeypatch.setattr(attention_module, "SHORT", 2)


def drawn(dtype: torch.dtype = torch.float64, tokens: int = 9) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, tokens, 4, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


WHERE = torch.ones(2, 1, 9, 9, dtype=torch.bool)
WHERE[1, :, :, 5:] = False
ADDED = torch.zeros(2, 1, 1, 9, dtype=torch.float64).masked_fill(~WHERE[:, :, :1], torch.finfo(torch.float32).min)


@pytest.mark.parametrize("mask", [None, WHERE, ADDED], ids=["none", "where", "added"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_without_dropout_it_is_torchs(mask: torch.Tensor | None, scale: float | None) -> None:
    parts = drawn()
    expected = functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale)
    found = dropout_attention(*parts, mask, NEVER, scale)
    torch.testing.assert_close(found, expected)
    slope = torch.randn(expected.shape, dtype=expected.dtype)
    for ours, theirs in zip(
        torch.autograd.grad(found, parts, slope), torch.autograd.grad(expected, parts, slope), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_its_gradient_is_that_of_its_values_with_what_was_dropped() -> None:
    def seeded(*parts: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return dropout_attention(*parts, WHERE, 0.3)

    assert not torch.equal(seeded(*drawn()), dropout_attention(*drawn(), WHERE, NEVER))
    assert torch.autograd.gradcheck(seeded, drawn())


def test_the_share_is_dropped_and_the_mean_stays() -> None:
    queries, keys = (torch.zeros(2, 3, 100, 4) for _ in range(2))  # attention is even: 1 / 100 each
    values = torch.eye(100).expand(2, 3, 100, 100)[..., :4]  # which shows four keys' shares
    torch.manual_seed(0)
    found = dropout_attention(queries, keys, values, None, 0.25) * 100
    torch.testing.assert_close(found, torch.where(found > 0.5, 1 / 0.75, 0.0))
    assert (found == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    again = dropout_attention(queries, keys, values, None, 0.25) * 100
    assert not torch.equal(found, again)
    torch.manual_seed(0)
    assert torch.equal(dropout_attention(queries, keys, values, None, 0.25) * 100, found)


def test_a_query_that_may_look_nowhere_is_no_nan() -> None:
    parts = drawn()
    mask = WHERE.clone()
    mask[0, 0, 3] = False
    found = dropout_attention(*parts, mask, 0.1)
    assert found.isfinite().all()
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(found.sum(), parts))


def test_half_precision_goes_in_and_out() -> None:
    parts = drawn(torch.bfloat16)
    found = dropout_attention(*parts, None, NEVER)
    expected = functional.scaled_dot_product_attention(*(part.detach().double() for part in parts))
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).abs().max() < 0.02
    assert all(slope.dtype == torch.bfloat16 for slope in torch.autograd.grad(found.sum(), parts))


@pytest.mark.parametrize("numbers", [40, 10_000], ids=["many tiles", "one tile"])
def test_under_autocast_values_and_gradients_are_those_without(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(attention_module, "NUMBERS", numbers)
    for dtype in (torch.float32, torch.bfloat16):
        parts, found = drawn(dtype), []
        for half in (False, True):
            torch.manual_seed(3)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                answer = dropout_attention(*parts, WHERE, 0.2)
            found.append([answer, *torch.autograd.grad(answer.float().square().sum(), parts)])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    "given",
    [
        {"is_causal": True},
        {"dropout_p": 1.0},
        {"query": torch.ones(3, 9, 4), "key": torch.ones(3, 9, 4), "value": torch.ones(3, 9, 4)},
        {"value": torch.ones(2, 3, 9, 5)},
        {name: torch.ones(2, 3, 1, 4) for name in ("query", "key", "value")},
    ],
    ids=["causal", "all dropped", "no heads", "other width", "short"],
)
def test_unsupported_attention_is_left_to_torch(given: dict[str, object]) -> None:
    query, key, value = (part.detach().float() for part in drawn())
    all_given = {"query": query, "key": key, "value": value, "dropout_p": 0.5} | given
    torch.manual_seed(0)
    expected = functional.scaled_dot_product_attention(**all_given)  # type: ignore[arg-type]
    torch.manual_seed(0)
    with TiledAttention():
        found = functional.scaled_dot_product_attention(**all_given)  # type: ignore[arg-type]
    assert torch.equal(found, expected)


def test_a_causal_mask_may_be_given_by_place() -> None:
    query, key, value = (part.detach().float() for part in drawn())
    with TiledAttention():
        torch.manual_seed(0)
        found = functional.scaled_dot_product_attention(query, key, value, None, 0.5, True)
    assert (
        (found[:, :, 0] == 0).logical_or(((found[:, :, 0] / value[:, :, 0]) - 2).abs() < 1e-5).all()
    )  # itself alone, or none


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - {"mpnet"}))  # which transformers computes by itself
def test_attention_is_tiled_in_training_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def counted(*given: object) -> torch.Tensor:
        seen.append(given[4])  # type: ignore[arg-type]
        return dropout_attention(*given[:4], NEVER, given[5])  # type: ignore[arg-type]

    monkeypatch.setattr(attention_module, "dropout_attention", counted)
    dropouts = (
        {"attention_dropout": 0.2} if kind in ("modernbert", "distilbert") else {"attention_probs_dropout_prob": 0.2}
    )
    model, given = encoder(kind, **dropouts), inputs()
    real = given["attention_mask"].bool()
    with TiledAttention():
        expected = model(**given).last_hidden_state[real]
        assert not seen
        for name, module in model.named_modules():  # no dropout but of the attention
            if isinstance(module, torch.nn.Dropout) and (module.p != 0.2 or name.endswith("out_drop")):
                module.p = 0.0
        model.train()
        found = model(**given).last_hidden_state[real]
    if model.config._attn_implementation == "eager":
        pytest.skip("this release of transformers has no other way for this family")
    assert seen == [0.2] * 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
