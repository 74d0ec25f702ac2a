"""Markers of head and tail in a teacher's vocabulary: what they change, and what not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import encoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compress.models.pretrained import Opened, load, load_encoder, open_model, save_tokenizer, with_markers
from compress.tasks import TEXT_CLASSIFICATION
from serve.text.entity_markers import MARKERS, knows_markers, marked

FAMILIES = ["bert", "roberta", "xlm-roberta", "electra", "distilbert", "mpnet", "modernbert"]
TOKENS = 2 + 256 + len(MARKERS)  # of `byte_pairs`, with the markers


def byte_pairs(folder: Path) -> None:
    """A tokenizer of bytes, in which a word after a blank is not the word at the start, as those of RoBERTa and ModernBERT."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def opened(folder: Path, family: str, rows: int = TOKENS - len(MARKERS), head: str = "") -> Opened:
    """A random model of `family` with so many rows of embeddings."""
    encoder(family, head, vocab_size=rows).save_pretrained(folder)
    byte_pairs(folder)
    return open_model(str(folder))


def rows_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.get_input_embeddings().weight.detach()
    return found


# Spare rows, which no token has, are what ModernBERT comes with.
@pytest.mark.parametrize(("family", "spare"), [*((family, 0) for family in FAMILIES), ("bert", 10), ("modernbert", 10)])
def test_every_family_gets_rows_for_the_markers_and_keeps_the_others(tmp_path: Path, family: str, spare: int) -> None:
    before = opened(tmp_path / "model", family, TOKENS - len(MARKERS) + spare, "ForMaskedLM")
    given = with_markers(before)
    assert given.added == MARKERS
    bare = rows_of(load(before, TEXT_CLASSIFICATION, ("a", "b")))
    for model in (
        load(given, TEXT_CLASSIFICATION, ("a", "b")),
        load_encoder(given, seed=1, vocabulary=True),
        load_encoder(given, seed=2),
    ):
        rows = rows_of(model)
        assert len(rows) == model.config.vocab_size == TOKENS - len(MARKERS) + max(spare, len(MARKERS))
        kept = [i for i in range(len(bare)) if not TOKENS - len(MARKERS) <= i < TOKENS]
        assert torch.equal(rows[kept], bare[kept])
        markers = rows[TOKENS - len(MARKERS) : TOKENS]
        assert torch.equal(markers, rows_of(load_encoder(given, seed=0))[TOKENS - len(MARKERS) : TOKENS])
        assert torch.pdist(markers).min() > torch.pdist(bare[2:258]).min()
        ids = torch.tensor([[5, TOKENS - 4, 6, TOKENS - 1]])
        assert torch.isfinite(next(iter(model(input_ids=ids, attention_mask=torch.ones_like(ids)).values()))).all()


def test_a_model_that_knows_the_markers_is_left_as_it_is(tmp_path: Path) -> None:
    given = with_markers(opened(tmp_path / "first", "bert"))
    model = load(given, TEXT_CLASSIFICATION, ("a", "b"))
    model.save_pretrained(tmp_path / "second")
    save_tokenizer(given, tmp_path / "second")
    again = with_markers(open_model(str(tmp_path / "second")))
    assert again.added == ()
    assert torch.equal(rows_of(load(again, TEXT_CLASSIFICATION)), rows_of(model))


def test_markers_are_tokens_that_change_nothing_about_the_text_around_them(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(with_markers(opened(tmp_path / "model", "roberta")), tmp_path / "saved")
    assert knows_markers(tokenizer)
    text = "Rome, they say, is in Italy."
    encoding = tokenizer.encode(marked(text, (16, 18), (22, 27)))
    tokens = [token for token in encoding.tokens if token.strip() not in MARKERS]
    assert len(encoding.tokens) - len(tokens) == 4
    assert tokens == tokenizer.encode(text).tokens
    assert not knows_markers(save_tokenizer(opened(tmp_path / "other", "bert"), tmp_path / "plain"))
