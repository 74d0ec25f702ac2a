"""A damaged checkpoint is a fault of what was given: one message names the file and says what to do."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import stillroom
from compress.models.pretrained import check_checkpoint, open_model, open_tokenizer
from compress.runs.lineage import read_lineage
from latency.candidates.candidate import Candidate
from latency.candidates.torch_candidate import load_torch
from serve.errors import BadInput
from stillroom.verbs.profile.models import task_of

ROWS = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def cut(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])


def weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def panicking(folder: Path) -> None:
    """Gives the tokenizer a table of characters that its library gives up at."""
    file = folder / "tokenizer.json"
    table = {"type": "Precompiled", "precompiled_charsmap": ""}
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"normalizer": table}), encoding="utf-8")


def retyped(**changes: Any) -> Callable[[Path], object]:
    """Gives QUERY another type."""
    return lambda folder: weights(folder, lambda held: held.update({QUERY: (held[QUERY] * 100).to(**changes)}))


def respelled(old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        text = (folder / "config.json").read_text(encoding="utf-8")
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def shards(*, outside: bool = False, suffix: str = ".safetensors", **index: object) -> Callable[[Path], object]:
    """Moves the weights to a file that an index names."""

    def change(folder: Path) -> None:
        file = folder / f"{'../' if outside else ''}part{suffix}"
        names = dict.fromkeys(load_file(folder / "model.safetensors"), str(file.relative_to(folder)))
        (folder / "model.safetensors").rename(file)
        stated = {"metadata": {}, "weight_map": names} | index
        (folder / "model.safetensors.index.json").write_text(json.dumps(stated), encoding="utf-8")

    return change


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 437\n"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut in the middle": (
        lambda f: cut(f / "model.safetensors", 20_000),
        r"its model\.safetensors is damaged \(SafetensorError: .*\)",
    ),
    "weights cut in the header": (
        lambda f: cut(f / "model.safetensors", 4),
        r"its model\.safetensors is damaged \(SafetensorError: .*\)",
    ),
    "a tensor of the encoder is missing": (
        lambda f: weights(f, lambda w: w.pop(QUERY)),
        rf"its weights lack {QUERY}, which its config\.json requires",
    ),
    "the head is missing": (
        lambda f: weights(f, lambda w: [w.pop("classifier.weight"), w.pop("classifier.bias")]),
        r"its weights lack classifier\.bias and 1 more, which its config\.json requires",
    ),
    "a tensor of another shape": (
        lambda f: weights(f, lambda w: w.update({QUERY: torch.zeros(16, 16)})),
        rf"its weights do not fit its config\.json: they hold {QUERY} of shape \[16, 16\] instead of \[32, 32\]",
    ),
    "a configuration of another size": (
        lambda f: config(f, hidden_size=16),
        r"its weights do not fit its config\.json: they hold .* and \d+ more",
    ),
    "a configuration cut": (
        lambda f: cut(f / "config.json", 100),
        r"its config\.json cannot be read \(JSONDecodeError",
    ),
    "a configuration that is a list": (
        lambda f: (f / "config.json").write_text("[]", encoding="utf-8"),
        r"its config\.json cannot be read",
    ),
    "a word where a number is needed": (
        lambda f: config(f, num_hidden_layers="four"),
        r"its config\.json cannot be read \(.*num_hidden_layers",
    ),
    "a family that is no name": (lambda f: config(f, model_type=["bert"]), r"is a \"\['bert'\]\" model"),
    "heads that do not divide the width": (
        lambda f: config(f, hidden_size=30),
        r"no model can be built from its config\.json \(ValueError: The hidden size \(30\)",
    ),
    "an activation that nobody knows": (
        lambda f: config(f, hidden_act="magic"),
        r"no model can be built from its config\.json \(KeyError: 'magic'\)",
    ),
    "labels with a gap": (
        lambda f: config(f, id2label={"0": "praise", "2": "refund"}),
        r"id2label in its config\.json has the ids 0, 2;",
    ),
    "labels as a list": (lambda f: config(f, id2label=["praise", "refund"]), r"id2label in its config\.json is a list"),
    "a class that is no list": (
        lambda f: config(f, architectures="BertForTokenClassification"),
        r"architectures in its config\.json is 'BertForTokenClassification', not a list",
    ),
    "an index without its files": (
        lambda f: [
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {QUERY: "model-00001-of-00002.safetensors"}}), encoding="utf-8"
            ),
        ],
        r"lacks model-00001-of-00002\.safetensors, which its model\.safetensors\.index\.json names",
    ),
    "an index cut": (
        lambda f: [
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text("{", encoding="utf-8"),
        ],
        r"its model\.safetensors\.index\.json cannot be read \(JSONDecodeError",
    ),
    "a pointer of Git LFS": (
        lambda f: (f / "model.safetensors").write_text(POINTER, encoding="utf-8"),
        r"its model\.safetensors is damaged \(it is a pointer of Git LFS, not the file: run git lfs pull\)",
    ),
    "an index that names a file outside": (shards(outside=True), r"index\.json names \.\./part\.safetensors; it needs"),
    "an index that names pickles": (shards(suffix=".bin"), r"index\.json names part\.bin; it needs \.safetensors"),
    "an index of nothing": (shards(weight_map={}), r"index\.json has no weight_map of files"),
    "an index without metadata": (shards(metadata=None), r"index\.json has no weight_map of files, or no metadata"),
    "whole numbers as weights": (retyped(dtype=torch.int8), rf"its weight {QUERY} is of type int8"),
    "bits as weights": (retyped(dtype=torch.bool), rf"its weight {QUERY} is of type bool"),
    "complex weights": (retyped(dtype=torch.complex64), rf"its weight {QUERY} is of type complex64"),
    "weights of 8 bits": (retyped(dtype=torch.float8_e4m3fn), rf"its weight {QUERY} is of type float8_e4m3fn"),
    "weights too large for float32": (
        lambda f: weights(f, lambda w: w.update({QUERY: w[QUERY].double() * 1e300})),
        rf"its weight {QUERY} has 1,024 values that are not finite",
    ),
    "a setting that is no number": (
        respelled("1e-12", "NaN"),
        r"its config\.json cannot be read \(.*layer_norm_eps is nan",
    ),
    "a setting beyond all numbers": (respelled("1e-12", "1e999"), r"\(ValueError: layer_norm_eps is inf\)"),
    "a setting below 0": (lambda f: config(f, layer_norm_eps=-1.0), r"\(ValueError: layer_norm_eps is -1\.0\)"),
    "a setting stated twice": (
        respelled('"hidden_size": 32', '"hidden_size": 16, "hidden_size": 32'),
        r"hidden_size is there twice, as 16 and 32",
    ),
    "fewer heads than none": (lambda f: config(f, num_attention_heads=-4), r"num_attention_heads is -4"),
    "millions of layers": (lambda f: config(f, num_hidden_layers=10**7), r"num_hidden_layers is 10000000"),
    "a list without end": (
        lambda f: (f / "config.json").write_text("[" * 100_000, encoding="utf-8"),
        r"its config\.json cannot be read \(RecursionError",
    ),
    "ids of labels that contradict each other": (
        lambda f: config(f, label2id={"praise": 1, "refund": 0, "status": 2}),
        r"'praise' is label 0 by id2label in its config\.json and label 1 by label2id",
    ),
    "two classes": (
        lambda f: config(f, architectures=["BertModel", "BertForSequenceClassification"]),
        r"architectures in its config\.json is \['BertModel', .*\], not a list of one class",
    ),
    "a class without a name": (lambda f: config(f, architectures=[None]), r"is \[None\], not a list of one class"),
    "a problem that nobody knows": (
        lambda f: config(f, problem_type="ranking"),
        r"problem_type in .* is 'ranking'; null",
    ),
    "no tokenizer": (
        lambda f: [(f / name).unlink() for name in ("tokenizer.json", "vocab.txt")],
        r"has no tokenizer; tokenizer\.json, vocab\.txt",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_a_checkpoint_is_named_when_it_is_opened(damage: str, checkpoint: Path) -> None:
    harm, message = DAMAGE[damage]
    open_model(str(checkpoint))
    harm(checkpoint)
    with pytest.raises(BadInput, match=message) as refused:
        open_model(str(checkpoint))
    assert str(refused.value).startswith(f"--teacher {checkpoint}")
    assert "\n" not in str(refused.value)


def test_a_broken_tokenizer_file_is_named(checkpoint: Path) -> None:
    cut(checkpoint / "tokenizer.json", 50)
    with pytest.raises(BadInput, match=r"its tokenizer cannot be opened from tokenizer\.json.* \(.*\)"):
        open_tokenizer(open_model(str(checkpoint)))


HEAD = "cls.predictions.transform.dense.weight"


@pytest.fixture
def vocabulary_model(checkpoint: Path) -> Path:
    """The checkpoint with a head for masked words."""
    from transformers import AutoConfig, BertForMaskedLM

    torch.manual_seed(0)
    BertForMaskedLM(AutoConfig.from_pretrained(checkpoint)).save_pretrained(checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.update({HEAD: held[HEAD][:-1].clone()}), f"they hold {HEAD} of shape"),
        (lambda held: held.pop(HEAD), f"its weights lack {HEAD}"),
        (lambda held: held.update({HEAD: held[HEAD].to(torch.int64)}), f"its weight {HEAD} is of type int64"),
    ],
)
def test_a_damaged_head_for_masked_words_is_refused_by_the_name_of_its_weight(
    vocabulary_model: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    weights(vocabulary_model, change)
    with pytest.raises(BadInput, match=re.escape(message)):
        open_model(str(vocabulary_model))


def test_an_encoder_without_the_head_that_its_class_has_is_opened(vocabulary_model: Path) -> None:
    weights(vocabulary_model, lambda held: [held.pop(key) for key in [*held] if key.startswith("cls.")])
    open_model(str(vocabulary_model))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", "{}".encode("utf-16"), b"\xef\xbb\xbf{}", b"[" * 100_000, POINTER.encode()]
)
def test_the_file_of_a_tokenizer_that_is_broken_is_named(file: str, content: bytes, checkpoint: Path) -> None:
    (checkpoint / file).write_bytes(content)
    with pytest.raises(BadInput, match=rf": its {file} cannot be read \("):
        open_tokenizer(open_model(str(checkpoint)))


def test_a_broken_lineage_is_named(checkpoint: Path) -> None:
    for broken in ("{", "[]"):
        (checkpoint / "lineage.json").write_text(broken, encoding="utf-8")
        with pytest.raises(BadInput, match=r"lineage\.json cannot be read .* Remove it, or copy the folder again"):
            read_lineage(checkpoint)


def test_every_verb_that_opens_a_checkpoint_names_the_damaged_file_and_writes_nothing(
    checkpoint: Path, task_data: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("please refund the lamp\n", encoding="utf-8")
    cut(checkpoint / "model.safetensors", 20_000)
    before = sorted(tmp_path.rglob("*"))
    for verb, call in verbs(str(checkpoint), task_data, corpus, tmp_path / "out").items():
        with pytest.raises(BadInput, match=r"its model\.safetensors is damaged"):
            call()
        assert sorted(tmp_path.rglob("*")) == before, verb
    with pytest.raises(BadInput, match=r"candidate 'mine': .*classifier cannot be opened \(SafetensorError"):
        load_torch(Candidate("mine", "torch", "fp32", checkpoint, 1))


FOREIGN: dict[str, dict[str, Any]] = {
    "a repository of the Hub": {"attn_implementation": "someone/attention"},
    "one of its revisions": {"_attn_implementation": "someone/attention@main:forward"},
    "one for each part": {"attn_implementation": {"": "someone/attention", "text_config": "sdpa"}},
    "within another configuration": {"text_config": {"attn_implementation": "someone/attention"}},
    "far within": {"mine": [{"deep": {"_attn_implementation": "someone/attention"}}]},
    "experts": {"experts_implementation": "deepgemm"},
    "experts within": {"text_config": {"_experts_implementation": "someone/experts"}},
    "another file": {"configuration_files": ["config.4.0.0.json"]},
}


@pytest.mark.parametrize("place", FOREIGN)
def test_a_checkpoint_that_asks_for_code_of_the_hub_is_refused_wherever_it_does(place: str, checkpoint: Path) -> None:
    shutil.copyfile(checkpoint / "config.json", checkpoint / "config.4.0.0.json")
    config(checkpoint, **FOREIGN[place])
    other = checkpoint / "config.4.0.0.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"attn_implementation": "someone/attention"}))
    for opening in (
        lambda: open_model(str(checkpoint)),
        lambda: check_checkpoint(checkpoint, str(checkpoint)),
        lambda: load_torch(Candidate("mine", "torch", "fp32", checkpoint, 1)),
    ):
        with pytest.raises(BadInput, match=r"its config\.json asks for the attention or experts of '.*', for which"):
            opening()


@pytest.mark.parametrize("own", ["eager", "sdpa", None])
def test_a_checkpoint_that_asks_for_attention_of_torch_opens(own: str | None, checkpoint: Path) -> None:
    config(checkpoint, attn_implementation=own)
    open_model(str(checkpoint))
    load_torch(Candidate("mine", "torch", "fp32", checkpoint, 1))


PROFILED: dict[str, tuple[Callable[[Path], object], str]] = {
    **{name: harm for name, harm in DAMAGE.items() if name not in ("no tokenizer", "a family that is no name")},
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), r"its model\.safetensors is damaged"),
    "missing weights": (lambda f: (f / "model.safetensors").unlink(), r"has no \.safetensors weights"),
    "an architecture that is a number": (
        lambda f: config(f, architectures=3),
        r"architectures in its config\.json is 3, not a list",
    ),
    "a list without the name of an architecture": (
        lambda f: config(f, architectures=[3]),
        r"architectures in its config\.json is \[3\], not a list",
    ),
    "too few labels": (lambda f: config(f, id2label={"0": "praise", "1": "refund"}), r"they hold classifier"),
}


@pytest.mark.parametrize("damage", PROFILED)
def test_a_damaged_checkpoint_is_not_profiled(damage: str, checkpoint: Path, tmp_path: Path) -> None:
    harm, message = PROFILED[damage]
    harm(checkpoint)
    with pytest.raises(BadInput, match=message) as refused:
        stillroom.profile([checkpoint], out=tmp_path / "out", seconds=1)
    assert str(refused.value).startswith(str(checkpoint))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "damage", ["a configuration that is a list", "labels as a list", "an architecture that is a number"]
)
def test_a_damaged_configuration_beside_a_graph_is_named(damage: str, checkpoint: Path) -> None:
    harm, message = PROFILED[damage]
    harm(checkpoint)
    (checkpoint / "model.onnx").touch()
    with pytest.raises(BadInput, match=message):
        task_of(checkpoint / "model.onnx")


def verbs(named: str, data: Path, corpus: Path, out: Path) -> dict[str, Callable[[], object]]:
    """A call of every verb that opens the checkpoint `named`."""
    splits = str(data)
    return {
        "evaluate": lambda: stillroom.evaluate(named, data / "test.jsonl"),
        "finetune": lambda: stillroom.finetune(named, "text-classification", splits, out),
        "distill": lambda: stillroom.distill(named, [corpus], out),
        "export": lambda: stillroom.export(named, out, splits),
        "profile": lambda: stillroom.profile([named], out=out, seconds=1),
        "run": lambda: stillroom.run(teacher=named, task="text-classification", data=splits, out=out),
    }


def add_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["lampshade", "lampstand"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_vocabulary_without_a_mask_needs_no_row_for_it(checkpoint: Path, task_data: Path) -> None:
    said = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    words = said["model"]["vocab"]
    gone, last = words.pop("[MASK]"), max(words, key=lambda word: words[word])
    words[last] = gone
    said["added_tokens"] = [token for token in said["added_tokens"] if token["content"] != "[MASK]"]
    (checkpoint / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    (checkpoint / "vocab.txt").unlink()
    weights(checkpoint, lambda held: held.update({ROWS: held[ROWS][: len(words)].clone()}))
    config(checkpoint, vocab_size=len(words))
    tokenizer = open_tokenizer(open_model(str(checkpoint)))
    assert tokenizer.token_to_id("[MASK]") is None
    assert max(tokenizer.encode("status of [MASK] mugs").ids) < len(words)
    stillroom.evaluate(str(checkpoint), task_data / "test.jsonl")
    check_checkpoint(checkpoint, "it")


def spoil(value: float) -> Callable[[Path], object]:
    return lambda folder: weights(folder, lambda held: held[QUERY].view(-1)[7:9].fill_(value))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight that is no number": (spoil(float("nan")), rf"its weight {QUERY} has 2 values that are not finite"),
    "an infinite weight": (spoil(float("-inf")), rf"its weight {QUERY} has 2 values that are not finite"),
    "a tokenizer with more ids than rows": (
        add_tokens,
        r"its tokenizer has ids up to \d+ \('lampstand'\), but its embedding has only \d+ rows",
    ),
    "a tokenizer that panics": (panicking, r"its tokenizer cannot be opened"),
    "a tokenizer cut": (lambda f: cut(f / "tokenizer.json", 50), r"its tokenizer cannot be opened"),
    "a configuration of a tokenizer cut": (
        lambda f: cut(f / "tokenizer_config.json", 20),
        r"its tokenizer_config\.json cannot be read",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
@pytest.mark.parametrize("verb", ["evaluate", "finetune", "distill", "export", "profile", "run"])
def test_what_cannot_be_read_by_a_checkpoint_is_refused_before_anything_is_written(
    verb: str, damage: str, checkpoint: Path, task_data: Path, tmp_path: Path
) -> None:
    harm, message = REFUSED[damage]
    if verb == "profile" and "configuration" in damage:
        pytest.skip("profile reads tokenizer.json alone")
    harm(checkpoint)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("please refund the lamp\n", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match=message) as refused:
        verbs(str(checkpoint), task_data, corpus, tmp_path / "out")[verb]()
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_is_evaluated_by_the_tokenizer_that_training_reads(
    whole: Path, checkpoint: Path, task_data: Path
) -> None:
    (checkpoint / "tokenizer.json").unlink()  # its vocabulary is there
    by_file, by_vocabulary = (stillroom.evaluate(str(f), task_data / "test.jsonl") for f in (whole, checkpoint))
    assert by_vocabulary | {"model": ""} == by_file | {"model": ""}
