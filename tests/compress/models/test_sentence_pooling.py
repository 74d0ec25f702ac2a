"""What a folder of sentence-transformers says of its vectors and scores is done, refused or told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from compress.distributed import warn
from compress.models.pretrained import load, open_model
from compress.models.sentence_encoder import open_encoder
from compress.models.sentence_pooling import SentencePooling, write_pooling
from compress.tasks import TEXT_CLASSIFICATION, TEXT_REGRESSION
from serve.errors import BadInput

Change = Callable[..., None]


def test_a_prompt_before_each_text_is_refused_and_others_are_told(
    checkpoint: Path, change_json: Change, caplog: pytest.LogCaptureFixture
) -> None:
    warn.cache_clear()
    write_pooling(checkpoint, SentencePooling(), 32, 32)
    prompts = {"query": "query: ", "document": ""}
    change_json("config_sentence_transformers.json", prompts=prompts, truncate_dim=8)
    open_encoder(str(checkpoint))
    assert "has prompts (query)" in caplog.text
    assert "truncate_dim is 8" in caplog.text
    change_json("config_sentence_transformers.json", default_prompt_name="document")
    open_encoder(str(checkpoint))
    change_json("config_sentence_transformers.json", default_prompt_name="query")
    with pytest.raises(BadInput, match=r"the prompt 'query: ' before each text \(default_prompt_name"):
        open_encoder(str(checkpoint))


def test_an_encoder_in_a_folder_below_is_refused_with_its_place(whole: Path, tmp_path: Path) -> None:
    write_pooling(tmp_path, SentencePooling(), 32, 32)
    modules = tmp_path / "modules.json"
    modules.write_text(
        modules.read_text()
        .replace('"path":""', '"path":"0_Transformer"')
        .replace('"path": ""', '"path": "0_Transformer"')
    )
    for file in (None, "config.json"):  # the folder itself may hold files of another encoder
        if file:
            (tmp_path / file).write_bytes((whole / file).read_bytes())
            (tmp_path / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
            (tmp_path / "tokenizer.json").write_bytes((whole / "tokenizer.json").read_bytes())
        with pytest.raises(BadInput, match="its encoder is in 0_Transformer"):
            open_encoder(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "activation Sigmoid"),
        ({"sentence_transformers": {"version": "5.0.0"}}, "activation Sigmoid"),  # the usual one
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "activation Tanh"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ""),
        ({}, ""),
    ],
)
def test_an_activation_behind_the_head_of_a_cross_encoder_is_told(
    changes: dict[str, object],
    told: str,
    checkpoint: Path,
    change_json: Change,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn.cache_clear()
    opened = open_model(str(checkpoint))
    load(opened, TEXT_REGRESSION, ("score",)).save_pretrained(checkpoint)
    change_json("config.json", **changes)
    opened = open_model(str(checkpoint))
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)
    # A new head has no activation.
    caplog.clear()
    load(opened, TEXT_CLASSIFICATION, ("no", "yes")).save_pretrained(checkpoint)
    open_model(str(checkpoint))
    assert not caplog.text
