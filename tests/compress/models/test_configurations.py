"""Settings of a configuration that change no answer stop nothing, and what cannot be read is named."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_task import make_teacher
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

import stillroom
from compress.models.answering import open_answering
from compress.models.pretrained import load, open_model
from compress.models.sentence_encoder import open_encoder
from compress.runs.lineage import read_lineage, save_with_lineage
from compress.runs.open_task import usable_length
from compress.tasks import TEXT_CLASSIFICATION, task_of
from serve.errors import BadInput
from serve.text.tokenizer import load_tokenizer
from stillroom.verbs.profile.models import Ways, candidates_of

Change = Callable[..., None]
HARMLESS: list[dict[str, object]] = [
    {"chunk_size_feed_forward": 4},
    {"_attn_implementation": "flash_attention_2", "attn_implementation": "flash_attention_2"},
    {"return_dict": False},
    {"torchscript": True},
    {"output_attentions": True, "output_hidden_states": True},
]


@pytest.mark.parametrize("changes", HARMLESS, ids=lambda changes: next(iter(changes)))
def test_harmless_settings_change_no_answer(changes: dict[str, object], checkpoint: Path, change_json: Change) -> None:
    ids = torch.arange(5, 12)[None]  # no multiple of a chunk
    before = load(open_model(str(checkpoint)), TEXT_CLASSIFICATION).eval()(input_ids=ids).logits
    change_json("config.json", **changes)
    after = load(open_model(str(checkpoint)), TEXT_CLASSIFICATION).eval()(input_ids=ids).logits
    torch.testing.assert_close(after, before)


NO_HEAD: dict[str, tuple[dict[str, object], str]] = {
    "a class of its own": ({"architectures": ["BertCrfForNer"]}, "BertCrfForNer"),
    "no class": ({"architectures": None}, "names no architectures in its config.json"),
    "three numbers": ({"problem_type": "regression"}, "gives 3 numbers for a text"),
    "no encoder of sentences": ({"architectures": ["BertForMaskedLM"]}, "its architecture is BertForMaskedLM"),
    "quantised weights": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
}


@pytest.mark.parametrize("kind", NO_HEAD)
def test_a_model_without_a_usable_head_is_refused(
    kind: str, checkpoint: Path, change_json: Change, tmp_path: Path
) -> None:
    changes, message = NO_HEAD[kind]
    change_json("config.json", **changes)
    for refused in (
        lambda: stillroom.export(str(checkpoint), tmp_path / "out", latency_seconds=0),
        lambda: open_answering(str(checkpoint), task_of),
    ):
        with pytest.raises(BadInput) as told:
            refused()
        assert message in str(told.value)


def test_a_tagger_is_never_multi_label(checkpoint: Path, change_json: Change) -> None:
    change_json("config.json", problem_type="multi_label_classification")
    assert open_model(str(checkpoint)).multi_label
    change_json("config.json", architectures=["BertForTokenClassification"])
    assert not open_model(str(checkpoint)).multi_label


def test_an_unknown_model_class_is_warned_of(
    checkpoint: Path, change_json: Change, caplog: pytest.LogCaptureFixture
) -> None:
    change_json("config.json", architectures=["MyBertForSequenceClassification"])
    assert open_model(str(checkpoint)).has_head
    assert "its class MyBertForSequenceClassification is not one of transformers" in caplog.text


@pytest.fixture(scope="module")
def padding_at_3(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path) -> Path:
    """A RoBERTa whose padding has the id 3 and whose table has 36 positions: the first 4 of them are unused."""
    from transformers import RobertaConfig, RobertaModel

    folder = shutil.copytree(shallow_teacher, tmp_path_factory.mktemp("roberta") / "model")
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = said["model"]["vocab"]
    words["[PAD]"], words["[SEP]"] = 3, 0
    ids = {"[PAD]": 3, "[SEP]": 0}
    for token in said["added_tokens"]:
        token["id"] = ids.get(token["content"], token["id"])
    said["added_tokens"].sort(key=lambda token: token["id"])
    text = json.dumps(said).replace('"id": "[SEP]", "ids": [3]', '"id": "[SEP]", "ids": [0]')
    text = text.replace('["[SEP]", 3]', '["[SEP]", 0]')
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "vocab.txt").unlink()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a").ids[-1] == 0
    config = RobertaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=36, type_vocab_size=1, pad_token_id=3, bos_token_id=2, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    RobertaModel(config).save_pretrained(folder)
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


def test_positions_before_the_padding_id_are_not_read(padding_at_3: Path, tmp_path: Path) -> None:
    assert open_model(str(padding_at_3)).max_length == 32
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"text": f"{word} {'a b ' * 40}", "label": word} for word in ("refund", "status") * 2]
    for split in ("train", "validation", "test"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = stillroom.finetune(
        str(padding_at_3), "text-classification", data, tmp_path / "made", new_head=True, epochs=1, device="cpu"
    )
    opened = open_model(str(made))
    encoding = load_tokenizer(Path(made), opened.max_length).encode("a b " * 40)
    assert len(encoding) == 32
    assert load(opened, TEXT_CLASSIFICATION)(input_ids=torch.tensor([encoding.ids])).logits.isfinite().all()


def test_longer_texts_are_read_where_they_are_asked_for_and_the_model_can_read_them(
    padding_at_3: Path, tmp_path: Path
) -> None:
    opened = open_model(str(padding_at_3))
    long = replace(opened, config=copy.deepcopy(opened.config))
    long.config.max_position_embeddings = 8196
    assert [usable_length(asked, long) for asked in (0, 600, 2048)] == [512, 600, 2048]
    with pytest.raises(BadInput, match="give 8 to 2,048 tokens, the most that stillroom reads at once"):
        usable_length(2049, long)
    with pytest.raises(BadInput, match="give 8 to 32 tokens, which"):
        usable_length(33, opened)
    save_with_lineage(load(opened, TEXT_CLASSIFICATION), opened, tmp_path / "short", {}, max_length=32)
    assert "max_length" not in read_lineage(tmp_path / "short")


def test_a_model_that_was_trained_here_on_longer_texts_is_asked_and_timed_with_these(tmp_path: Path) -> None:
    opened = open_model(str(make_teacher(tmp_path / "long", num_hidden_layers=1, max_position_embeddings=1024)))
    made = tmp_path / "made"
    save_with_lineage(load(opened, TEXT_CLASSIFICATION, ("a", "b")), opened, made, {}, max_length=600)
    (timed,) = candidates_of(made, Ways(runtimes=("torch",)), tmp_path, [])
    lengths = (open_answering(str(made), task_of).max_length, open_encoder(str(made)).max_length, timed.max_length)
    assert lengths == (600, 600, 600)


def test_a_checkpoint_that_learned_from_longer_texts_reads_them_so_everywhere(
    padding_at_3: Path, tmp_path: Path
) -> None:
    opened = open_model(str(padding_at_3))
    longer = replace(opened, config=copy.deepcopy(opened.config))
    longer.config.max_position_embeddings, longer.config.num_labels = 2052, 2
    save_with_lineage(
        AutoModelForSequenceClassification.from_config(longer.config), longer, tmp_path / "made", {}, max_length=2000
    )
    made = open_model(str(tmp_path / "made"))
    assert (made.max_length, made.most_tokens) == (2000, 2048)
    assert open_answering(str(tmp_path / "made"), task_of, max_length=2000).max_length == 2000
