"""What is read of one text: each family's attention, hidden vectors and value relations, and how heads are chosen."""

from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import encoder
from small_task import make_tokenizer

from compress.data.examples import Example
from compress.models.attention_reading import Reader, open_reader, read_text, relation_heads
from compress.models.families import FAMILIES
from compress.models.pretrained import open_model
from compress.tasks import TEXT_CLASSIFICATION
from serve.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_gives_the_attention_that_it_computes_with(kind: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    size = len((tmp_path / "vocab.txt").read_text(encoding="utf-8").split("\n"))
    encoder(kind, vocab_size=size).save_pretrained(tmp_path)
    reader = open_reader(open_model(str(tmp_path)), None)
    assert (reader.layers, reader.heads, reader.width) == (4, 4, 24)
    tokenizer = load_tokenizer(tmp_path, 32)
    encoded = TEXT_CLASSIFICATION.encode(
        [Example("refund the kettle"), Example("where is my lamp sent to")], tokenizer, ()
    )
    alone = read_text(reader, encoded, 0)
    assert len(alone.attentions) == 4
    attention, tokens = alone.attention(4), len(encoded.ids[0])
    assert attention.shape == (4, tokens, tokens)
    torch.testing.assert_close(attention.sum(dim=-1), torch.ones(4, tokens))
    assert alone.hidden(4).shape == (tokens, 24)

    values = alone.activations["values", 2][0].double().numpy().reshape(tokens, 3, 8)
    for head in range(3):
        scores = values[:, head] @ values[:, head].T / np.sqrt(8)
        raised = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = raised / raised.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(alone.value_relation(2, 3)[head].numpy(), expected, atol=1e-6)

    # Alone or padded beside a longer text, it attends to its own tokens in the same way.
    longest = max(map(len, encoded.ids))
    ids = torch.full((2, longest), encoded.pad_id)
    mask = torch.zeros(2, longest, dtype=torch.long)
    for row, of in enumerate(encoded.ids):
        ids[row, : len(of)], mask[row, : len(of)] = torch.from_numpy(of), 1
    with torch.inference_mode():
        padded = reader.model(input_ids=ids, attention_mask=mask).attentions[3][0, :, :tokens, :tokens]
    torch.testing.assert_close(padded, attention, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("teacher", "student", "expected"),
    [((12, 384), (12, 384), 12), ((12, 768), (6, 312), 12), ((4, 32), (3, 24), 4), ((5, 35), (3, 24), 1)],
)
def test_relations_have_as_many_heads_as_both_widths_allow(
    teacher: tuple[int, int], student: tuple[int, int], expected: int
) -> None:
    theirs, ours = (Reader(None, 1, *sizes) for sizes in (teacher, student))
    assert relation_heads(theirs, ours) == expected
