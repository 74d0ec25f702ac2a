"""What a folder of sentence-transformers says of its vectors and scores is done, refused or told."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.distributed import warn
from compress.models.answering import open_answering
from compress.models.pretrained import load, open_model
from compress.models.sentence_encoder import open_encoder
from compress.models.sentence_pooling import SentencePooling, max_tokens_in, write_pooling
from compress.tasks import TEXT_CLASSIFICATION, TEXT_REGRESSION, task_of
from serve.errors import BadInput

Change = Callable[..., None]


def test_a_default_prompt_is_refused_and_others_are_warned_of(
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


SETTINGS, PROMPTS, POOLING = "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"


def outputs(name: str) -> dict[str, object]:
    return {"modality_config": {"text": {"method": "forward", "method_output_name": name}}}


PLAIN = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"} | outputs(
    "last_hidden_state"
)
STRANGE: dict[str, tuple[str, dict[str, object], str]] = {
    "another head": (SETTINGS, {"transformer_task": "fill-mask"}, f"{SETTINGS} has transformer_task,"),
    "another output": (SETTINGS, outputs("pooler_output"), f"{SETTINGS} has modality_config,"),
    "texts cut elsewhere": (SETTINGS, {"processing_kwargs": {"text": {"max_length": 8}}}, "has processing_kwargs,"),
    "lengths of queries": (SETTINGS, {"query_length": 32}, "has query_length,"),
    "other layers": (SETTINGS, {"config_args": {"num_hidden_layers": 1}}, "has config_args.num_hidden_layers,"),
    "a key of the future": (SETTINGS, {"rotation": 3}, "has rotation,"),
    "an older name of the file": ("sentence_roberta_config.json", {"rotation": 3}, "sentence_roberta_config.json has"),
    "a length that is text": (SETTINGS, {"max_seq_length": "16"}, "max_seq_length is '16'"),
    "a length of nothing": (SETTINGS, {"max_seq_length": 2}, "max_seq_length is 2 in"),
    "a word for false": (SETTINGS, {"do_lower_case": "false"}, "do_lower_case is 'false'"),
    "a prompt without a text": (PROMPTS, {"default_prompt_name": "nobody"}, "default_prompt_name is 'nobody'"),
    "a prompt that is a number": (PROMPTS, {"prompts": {"query": 3}}, "prompts in .* is not an object of texts"),
    "an unknown pooling": (POOLING, {"rotation": 3}, f"{POOLING} has rotation,"),
    "a prompt left out of the mean": (POOLING, {"include_prompt": False}, "has include_prompt,"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_settings_that_change_vectors_are_refused_by_name(kind: str, checkpoint: Path, change_json: Change) -> None:
    file, changes, message = STRANGE[kind]
    write_pooling(checkpoint, SentencePooling(), 32, 32)
    if file == POOLING:
        change_json(PROMPTS, prompts={"query": "query: "})
    if file.startswith("sentence_roberta"):
        (checkpoint / SETTINGS).unlink()
    change_json(file, **changes)
    with pytest.raises(BadInput, match=message):
        open_encoder(str(checkpoint))


def test_settings_that_change_no_vector_pass(checkpoint: Path, change_json: Change) -> None:
    write_pooling(checkpoint, SentencePooling(), 32, 32)
    arguments = {"torch_dtype": "float16", "trust_remote_code": True}
    change_json(SETTINGS, **PLAIN, unpad_inputs=True, processing_kwargs={}, model_args=arguments)
    (checkpoint / POOLING).write_text('{"embedding_dimension": 32, "pooling_mode": ["mean"], "include_prompt": false}')
    assert open_encoder(str(checkpoint)).how == SentencePooling("mean", normalised=True)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_module_of_another_package_is_refused_by_its_name(place: int, checkpoint: Path) -> None:
    write_pooling(checkpoint, SentencePooling(), 32, 32)
    modules = json.loads((checkpoint / "modules.json").read_text())
    own = modules[place]["type"] = modules[place]["type"].replace("sentence_transformers.models", "mine")
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(BadInput, match=f"makes its vectors by .*{own}"):
        open_encoder(str(checkpoint))


def test_dot_products_of_unnormalised_vectors_are_warned_of(
    checkpoint: Path, change_json: Change, caplog: pytest.LogCaptureFixture
) -> None:
    warn.cache_clear()
    change_json(PROMPTS, similarity_fn_name="dot")
    write_pooling(checkpoint, SentencePooling(normalised=True), 32, 32)
    open_encoder(str(checkpoint))
    assert not caplog.text
    write_pooling(checkpoint, SentencePooling(normalised=False), 32, 32)
    open_encoder(str(checkpoint))
    assert "similarity_fn_name is dot" in caplog.text


def test_texts_are_cut_where_sentence_transformers_cuts_them(checkpoint: Path, change_json: Change) -> None:
    write_pooling(checkpoint, SentencePooling(), 32, 24)
    change_json("tokenizer_config.json", model_max_length=16)
    assert open_encoder(str(checkpoint)).max_length == max_tokens_in(checkpoint, 32) == 24
    change_json(SETTINGS, max_seq_length=None)  # as later versions write it
    assert open_encoder(str(checkpoint)).max_length == max_tokens_in(checkpoint, 32) == 16
    change_json("tokenizer_config.json", model_max_length=2)
    with pytest.raises(BadInput, match="reads 2 tokens of a text, by model_max_length"):
        open_answering(str(checkpoint), task_of)


def test_an_encoder_in_a_folder_below_is_refused_with_its_place(whole: Path, tmp_path: Path) -> None:
    write_pooling(tmp_path, SentencePooling(), 32, 32)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for files in ((), ("config.json", "model.safetensors", "tokenizer.json")):  # of another encoder
        for file in files:
            (tmp_path / file).write_bytes((whole / file).read_bytes())
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
def test_the_activation_of_a_cross_encoder_is_warned_of(
    changes: dict[str, object], told: str, checkpoint: Path, change_json: Change, caplog: pytest.LogCaptureFixture
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
