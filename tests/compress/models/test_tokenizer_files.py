"""The tokenizer of a folder is what its tokenizer.json says, whatever class its tokenizer_config.json names."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_task import write_rows
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

import stillroom
from compress.distributed import warn
from compress.models.answering import open_answering
from compress.models.pretrained import open_model, open_tokenizer, save_tokenizer
from compress.models.tokenizer_files import PROBE
from compress.tasks import task_of
from serve.errors import BadInput

Change = Callable[..., None]


@pytest.fixture(autouse=True)
def warned_anew() -> None:
    """Every test hears its warnings, though a process says each once."""
    warn.cache_clear()


def in_file(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, *texts: str | tuple[str, str]) -> list[list[int]]:
    """The ids of whole texts."""
    tokenizer.no_truncation()
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts or (PROBE,)))]


def filled(tokenizer: Tokenizer, folder: Path) -> int:
    """The rows of the model's embedding, once each has its token."""
    rows: int = open_model(str(folder)).config.vocab_size
    tokenizer.add_special_tokens([f"[{n}]" for n in range(rows - tokenizer.get_vocab_size())])
    return rows


def longest_word(tokenizer: Tokenizer) -> str:
    return max((token for token in tokenizer.get_vocab() if token.isalpha()), key=len)


def normalised(tokenizer: Tokenizer, **settings: bool) -> None:
    tokenizer.normalizer = normalizers.BertNormalizer(**settings)


def own_steps(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("ship", "track"), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def no_special_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])


def words_of_its_own(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken(longest_word(tokenizer), normalized=True)])  # also within longer words


# What is changed in tokenizer.json, and from which transformers on that is told: 0 for every one.
CHANGES: dict[str, tuple[Callable[[Tokenizer], None], int | None]] = {
    "steps of its own": (own_steps, 5),
    "accents are kept": (partial(normalised, lowercase=True, strip_accents=False), 0),
    "case is kept": (partial(normalised, lowercase=False), 0),
    "no special tokens": (no_special_tokens, 5),
    "words of its own": (words_of_its_own, None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_reads_the_tokens_of_its_tokenizer_file(
    name: str, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, told_from = CHANGES[name]
    tokenizer = in_file(checkpoint)
    change(tokenizer)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    texts = [PROBE, f"Ship two Mugs to Café Oslo, a{longest_word(tokenizer)}x", ("a mug", "Refund it")]
    expected = ids_of(tokenizer, *texts)
    opened = open_model(str(checkpoint))
    assert ids_of(open_tokenizer(opened), *texts) == expected
    assert ids_of(open_answering(str(checkpoint), task_of).tokenizer, *texts) == expected
    if told_from is not None and int(transformers.__version__.split(".")[0]) >= told_from:
        assert "tokenizer.json" in caplog.text
        assert "different tokens" in caplog.text
    # A checkpoint made from it says so by itself.
    save_tokenizer(opened, tmp_path / "made")
    warn.cache_clear()
    caplog.clear()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "made" / file).write_bytes((checkpoint / file).read_bytes())
    assert ids_of(open_tokenizer(open_model(str(tmp_path / "made"))), *texts) == expected
    assert not caplog.text


def test_a_tokenizer_as_it_was_saved_is_kept_without_a_word(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ids_of(open_tokenizer(open_model(str(checkpoint)))) == ids_of(in_file(checkpoint))
    assert not caplog.text


@pytest.mark.parametrize("name", ["BertJapaneseTokenizer", "NobodysTokenizer"])
def test_an_unusable_tokenizer_class_is_passed_over(
    name: str, checkpoint: Path, change_json: Change, caplog: pytest.LogCaptureFixture
) -> None:
    change_json("tokenizer_config.json", tokenizer_class=name)
    assert ids_of(open_tokenizer(open_model(str(checkpoint)))) == ids_of(in_file(checkpoint))
    if name == "BertJapaneseTokenizer":
        assert f"the tokenizer_class {name}" in caplog.text


def test_a_special_token_without_a_row_is_read_as_characters(
    checkpoint: Path, change_json: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = in_file(checkpoint)
    rows = filled(tokenizer, checkpoint)
    plain = tokenizer.encode("[USER] refund").ids
    tokenizer.add_special_tokens(["[USER]"])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    change_json("tokenizer_config.json", additional_special_tokens=["[USER]"])
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "validation", "test"):
        refund, praise = {"text": "[USER] refund", "label": "refund"}, {"text": "[USER] good", "label": "praise"}
        write_rows(data / f"{split}.jsonl", [refund, praise])
    settings: dict[str, Any] = {"new_head": True, "epochs": 1, "max_length": 16, "device": "cpu"}
    trained = stillroom.finetune(str(checkpoint), "text-classification", data, tmp_path / "made", **settings)
    assert "no row for the special token [USER]" in caplog.text
    for folder in (checkpoint, Path(trained)):
        found = open_tokenizer(open_model(str(folder)))
        assert found.encode("[USER] refund").ids == plain
        assert max(found.get_vocab().values()) == rows - 1


def test_a_token_without_a_row_that_stands_around_every_text_is_refused(checkpoint: Path) -> None:
    tokenizer = in_file(checkpoint)
    filled(tokenizer, checkpoint)
    tokenizer.add_special_tokens(["[END]"])
    end = tokenizer.token_to_id("[END]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [END]", pair="$A $B [END]", special_tokens=[("[END]", end)]
    )
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    with pytest.raises(BadInput, match=rf"ids up to {end} \('\[END\]'\), but its embedding has only {end} rows"):
        open_tokenizer(open_model(str(checkpoint)))


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel", "Unigram"])
def test_a_vocabulary_without_a_token_for_unknown_words_is_refused_at_the_door(checkpoint: Path, kind: str) -> None:
    words = [word for word in in_file(checkpoint).get_vocab() if word not in ("[UNK]", "[unused]")]
    if kind == "Unigram":
        model = models.Unigram([(word, 0.0) for word in words])
    else:
        ids = {word: id for id, word in enumerate(words)}
        model = getattr(models, kind)(ids, unk_token="[UNK]")  # noqa: S106 - no password
    Tokenizer(model).save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(BadInput, match=rf"{checkpoint.name}: its tokenizer fails at a word"):
        open_tokenizer(open_model(str(checkpoint)))


def test_the_dropout_of_a_tokenizer_is_left_out_and_told(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    merges = [("r", "o"), ("m", "e"), ("ro", "me")]
    tokens = {token: id for id, token in enumerate(["[PAD]", "[UNK]", "r", "o", "m", "e", "ro", "me", "rome"])}
    Tokenizer(models.BPE(tokens, merges, dropout=0.5, unk_token="[UNK]")).save(str(checkpoint / "tokenizer.json"))  # noqa: S106 - no password
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = open_tokenizer(open_model(str(checkpoint)))
    assert {tuple(tokenizer.encode("rome").ids) for _ in range(50)} == {(8,)}
    assert "has a dropout of 0.5" in caplog.text
    assert "different tokens" not in caplog.text


def test_ignored_tokenizer_settings_are_warned_of(
    checkpoint: Path, change_json: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sides = {"truncation_side": "left", "padding_side": "left"}
    change_json("tokenizer_config.json", **sides, model_input_names=["input_ids", "attention_mask"])
    save_tokenizer(open_model(str(checkpoint)), tmp_path / "made")
    open_tokenizer(open_model(str(checkpoint)))
    for told in (
        "truncation_side of its tokenizer is left",
        "padding_side of its tokenizer is left",
        "model_input_names of its tokenizer leaves out token_type_ids",
    ):
        assert told in caplog.text
    assert '"padding_side": "left"' not in (tmp_path / "made" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("flag", ["single_word", "normalized"])
def test_added_tokens_follow_the_tokenizer_file(
    flag: str, checkpoint: Path, change_json: Change, caplog: pytest.LogCaptureFixture
) -> None:
    mask = in_file(checkpoint).token_to_id("[MASK]")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True, flag: True}
    change_json("tokenizer_config.json", added_tokens_decoder={str(mask): {"content": "[MASK]"} | flags})
    texts = ["a[MASK]b", "[mask] a"]
    assert ids_of(open_tokenizer(open_model(str(checkpoint))), *texts) == ids_of(in_file(checkpoint), *texts)
    assert "different tokens" in caplog.text


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_an_added_token_with_another_id_is_refused(file: str, checkpoint: Path, change_json: Change) -> None:
    rows = open_model(str(checkpoint)).config.vocab_size + 200
    change_json("config.json", vocab_size=rows)
    held = load_file(checkpoint / "model.safetensors")
    held["bert.embeddings.word_embeddings.weight"] = torch.zeros(rows, 32)
    save_file(held, checkpoint / "model.safetensors", metadata={"format": "pt"})
    stated = (
        {"<x>": rows - 1} if file == "added_tokens.json" else {"added_tokens_decoder": {rows - 1: {"content": "<x>"}}}
    )
    change_json(file, **stated)
    with pytest.raises(BadInput, match=rf"gives the token '<x>' the id {rows - 1}, and it would get \d+ here"):
        open_tokenizer(open_model(str(checkpoint)))


@pytest.mark.parametrize("kind", ["two words of one id", "another id around texts"])
def test_a_tokenizer_that_contradicts_itself_is_refused(kind: str, checkpoint: Path) -> None:
    text = (checkpoint / "tokenizer.json").read_text(encoding="utf-8")
    said = json.loads(text)
    if kind == "two words of one id":
        said["model"]["vocab"]["lampshade"] = 7
    else:
        said["post_processor"] = json.loads(json.dumps(said["post_processor"]).replace('"ids": [3]', '"ids": [300]'))
    (checkpoint / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(BadInput, match=r"and 'lampshade' one id, 7|puts '\[SEP\]' around texts as id 300"):
        open_tokenizer(open_model(str(checkpoint)))


def test_texts_are_lowered_where_sentence_transformers_lowers_them(checkpoint: Path, change_json: Change) -> None:
    tokenizer = in_file(checkpoint)
    normalised(tokenizer, lowercase=False)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    change_json("tokenizer_config.json", do_lower_case=False)
    change_json("sentence_bert_config.json", max_seq_length=32, do_lower_case=True)
    found = open_tokenizer(open_model(str(checkpoint)))
    shouted, plain = "Refund MY Order", "refund my order"
    assert found.encode(shouted).ids == found.encode(plain).ids != tokenizer.encode(shouted).ids
