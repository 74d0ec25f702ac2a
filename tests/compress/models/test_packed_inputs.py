"""Every family gives the pieces of a packed row what it gives each of them alone."""

from typing import Any

import pytest
import torch
from encoders import VOCABULARY, config_of, encoder

from compress.models.activations import Part, read
from compress.models.families import FAMILIES, kept_apart, row_tokens_for

LENGTHS = [[5, 1, 8, 2], [16], [9, 4]]  # of pieces, by row; the last row has padding
PACKED = sorted(kind for kind in FAMILIES if kind != "modernbert")
PARTS = [Part("hidden", 0), *(Part(of, 4) for of in ("hidden", "queries", "keys", "values", "scores"))]


def inputs() -> dict[str, torch.Tensor]:
    ids, numbers, positions = torch.ones(3, 16, dtype=torch.long), torch.zeros(3, 16).long(), torch.zeros(3, 16).long()
    generator = torch.Generator().manual_seed(0)
    for row, lengths in enumerate(LENGTHS):
        first = 0
        for number, length in enumerate(lengths, 1):
            part = slice(first, first + length)
            ids[row, part] = torch.randint(5, VOCABULARY, (length,), generator=generator)
            numbers[row, part], positions[row, part] = number, torch.arange(length)
            first += length
    return {"input_ids": ids, "attention_mask": numbers, "position_ids": positions}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", PACKED)
def test_a_piece_in_a_row_is_read_as_it_is_alone(kind: str, attention: str) -> None:
    model, given = encoder(kind, attention=attention).double(), inputs()
    together = read(model, kept_apart(model, given), PARTS)
    for row, lengths in enumerate(LENGTHS):
        for number in range(1, len(lengths) + 1):
            inside = given["attention_mask"][row] == number
            alone = read(model, {"input_ids": given["input_ids"][row, inside][None]}, PARTS)
            for part in PARTS[:-1]:
                torch.testing.assert_close(together[part][row, inside], alone[part][0], rtol=1e-9, atol=1e-9)
            scores = together.scores[4].scores()[row][:, inside][:, :, inside]
            torch.testing.assert_close(scores, alone.scores[4].scores()[0], rtol=1e-9, atol=1e-9)
    assert all(torch.isfinite(part).all() for part in together.parts.values())


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_in_half_precision_pieces_stay_apart_too(precision: torch.dtype) -> None:
    model, given = encoder("bert"), inputs()
    other = given | {"input_ids": given["input_ids"].clone()}
    other["input_ids"][0, :5] = 7  # the first piece of the first row
    found: list[Any] = []
    for one in (given, other):
        with torch.autocast("cpu", precision):
            found.append(read(model, kept_apart(model, one), PARTS[:2]))
    first, second = (one["hidden", 4][0] for one in found)
    assert torch.isfinite(first).all()
    assert torch.equal(first[5:], second[5:])
    assert not torch.equal(first[:5], second[:5])


def test_a_family_whose_windows_would_be_lost_is_not_packed() -> None:
    assert row_tokens_for(128, config_of("bert"), config_of("distilbert")) == 128
    assert row_tokens_for(128, config_of("modernbert")) == 0
    assert row_tokens_for(128, config_of("bert"), config_of("modernbert")) == 0


def test_on_a_transformers_that_takes_no_such_mask_text_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.3")
    assert row_tokens_for(128, config_of("bert")) == 0
