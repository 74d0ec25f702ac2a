"""A damaged checkpoint is a fault of what was given: one message names the file and says what to do."""

import json
import os
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
INDEX = "model.safetensors.index.json"
Harm = Callable[[Path], object]


def cut(file: str, kept: int) -> Harm:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:kept])


def without(*files: str) -> Harm:
    return lambda folder: [(folder / file).unlink() for file in files]


def holding(file: str, content: str) -> Harm:
    return lambda folder: (folder / file).write_text(content, encoding="utf-8")


def both(*harms: Harm) -> Harm:
    return lambda folder: [harm(folder) for harm in harms]


def weights(change: Callable[[dict[str, Any]], object]) -> Harm:
    def harm(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return harm


def query(change: Callable[[torch.Tensor], torch.Tensor]) -> Harm:
    """Changes the weight QUERY."""
    return weights(lambda held: held.update({QUERY: change(held[QUERY]).clone()}))


def extra(key: str) -> Harm:
    return weights(lambda held: held.update({key: torch.ones(2, 2)}))


def spoilt(value: float) -> Harm:
    return weights(lambda held: held[QUERY].view(-1)[7:9].fill_(value))


def stated(file: str = "config.json", **changes: object) -> Harm:
    """Changes keys of a JSON file."""
    return lambda f: (f / file).write_text(json.dumps(json.loads((f / file).read_text(encoding="utf-8")) | changes))


def respelled(old: str, new: str) -> Harm:
    def harm(folder: Path) -> None:
        text = (folder / "config.json").read_text(encoding="utf-8")
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new, 1), encoding="utf-8")

    return harm


def shards(*, outside: bool = False, suffix: str = ".safetensors", **index: object) -> Harm:
    """Moves the weights to a file that an index names."""

    def harm(folder: Path) -> None:
        file = folder / f"{'../' if outside else ''}part{suffix}"
        names = dict.fromkeys(load_file(folder / "model.safetensors"), str(file.relative_to(folder)))
        (folder / "model.safetensors").rename(file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names} | index), encoding="utf-8")

    return harm


def add_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["lampshade", "lampstand"])
    tokenizer.save(str(folder / "tokenizer.json"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 437\n"
SELF, CLASSES = "bert.encoder.layer.0.attention.self", "BertForSequenceClassification"
GONE = without("model.safetensors")
TWO_CLASSES = stated(architectures=["BertModel", CLASSES])
# What is wrong, and what the message names.
DAMAGE: dict[str, tuple[Harm, str]] = {
    "weights cut in the middle": (cut("model.safetensors", 20_000), "its model.safetensors is damaged (SafetensorError"),
    "weights cut in the header": (cut("model.safetensors", 4), "its model.safetensors is damaged (SafetensorError"),
    "empty weights": (cut("model.safetensors", 0), "its model.safetensors is damaged"),
    "no weights": (GONE, "no .safetensors weights"),
    "a pointer of Git LFS": (holding("model.safetensors", POINTER), "git lfs pull"),
    "a tensor of the encoder is missing": (weights(lambda w: w.pop(QUERY)), f"lack {QUERY}"),
    "the head is missing": (
        weights(lambda w: [w.pop("classifier.weight"), w.pop("classifier.bias")]), "lack classifier.bias and 1 more",
    ),
    "a tensor of another shape": (query(lambda w: w[:16, :16]), f"{QUERY} of shape [16, 16] instead of [32, 32]"),
    "a configuration of another size": (stated(hidden_size=16), "do not fit its config.json"),
    "too few labels": (stated(id2label={"0": "praise", "1": "refund"}), "they hold classifier"),
    "whole numbers as weights": (query(lambda w: (100 * w).to(torch.int8)), "of type int8"),
    "bits as weights": (query(lambda w: w.to(torch.bool)), "of type bool"),
    "complex weights": (query(lambda w: w.to(torch.complex64)), "of type complex64"),
    "weights of 8 bits": (query(lambda w: w.to(torch.float8_e4m3fn)), "of type float8_e4m3fn"),
    "weights too large for float32": (query(lambda w: w.double() * 1e300), f"{QUERY} has 1,024 values that are not finite"),
    "a weight that is no number": (spoilt(float("nan")), f"{QUERY} has 2 values that are not finite"),
    "an infinite weight": (spoilt(float("-inf")), f"{QUERY} has 2 values that are not finite"),
    "an index without its files": (
        both(GONE, holding(INDEX, json.dumps({"weight_map": {QUERY: "model-1.safetensors"}}))), "lacks model-1.safetensors",
    ),
    "an index cut": (both(GONE, holding(INDEX, "{")), f"its {INDEX} cannot be read (JSONDecodeError"),
    "an index that names a file outside": (shards(outside=True), "index.json names ../part.safetensors"),
    "an index that names pickles": (shards(suffix=".bin"), "index.json names part.bin"),
    "an index of nothing": (shards(weight_map={}), "no weight_map of files"),
    "an index without metadata": (shards(metadata=None), "or no metadata"),
    "a configuration cut": (cut("config.json", 100), "its config.json cannot be read (JSONDecodeError"),
    "a configuration that is a list": (holding("config.json", "[]"), "its config.json cannot be read"),
    "a list without end": (holding("config.json", "[" * 100_000), "its config.json cannot be read (RecursionError"),
    "a word where a number is needed": (stated(num_hidden_layers="four"), "num_hidden_layers"),
    "a family that is no name": (stated(model_type=["bert"]), "is a \"['bert']\" model"),
    "heads that do not divide the width": (stated(hidden_size=30), "hidden size (30)"),
    "an activation that nobody knows": (stated(hidden_act="magic"), "'magic'"),
    "labels with a gap": (stated(id2label={"0": "praise", "2": "refund"}), "id2label in its config.json has the ids 0, 2"),
    "labels as a list": (stated(id2label=["praise", "refund"]), "id2label in its config.json is a list"),
    "a class that is no list": (stated(architectures=CLASSES), f"architectures in its config.json is '{CLASSES}', not a list"),
    "an architecture that is a number": (stated(architectures=3), "architectures in its config.json is 3, not a list"),
    "two classes": (TWO_CLASSES, "not a list of one class"),
    "a class without a name": (stated(architectures=[None]), "is [None], not a list of one class"),
    "a setting that is no number": (respelled("1e-12", "NaN"), "layer_norm_eps is nan"),
    "a setting beyond all numbers": (respelled("1e-12", "1e999"), "layer_norm_eps is inf"),
    "a setting below 0": (stated(layer_norm_eps=-1.0), "layer_norm_eps is -1.0"),
    "a setting stated twice": (respelled('"hidden_size": 32', '"hidden_size": 16, "hidden_size": 32'), "there twice, as 16 and 32"),
    "fewer heads than none": (stated(num_attention_heads=-4), "num_attention_heads is -4"),
    "millions of layers": (stated(num_hidden_layers=10**7), "num_hidden_layers is 10000000"),
    "ids of labels that contradict each other": (
        stated(label2id={"praise": 1, "refund": 0, "status": 2}), "'praise' is label 0 by id2label",
    ),
    "a problem that nobody knows": (stated(problem_type="ranking"), "is 'ranking'"),
    "no tokenizer": (without("tokenizer.json", "vocab.txt"), "has no tokenizer"),
    # Weights that would change the answers, and are not used.
    "relative positions": (extra(f"{SELF}.distance_embedding.weight"), f"{SELF}.distance_embedding.weight, which {CLASSES}"),
    "an adapter within": (extra(f"{SELF}.query.lora_A.default.weight"), "Merge the adapter"),
    "one layer more": (extra("bert.encoder.layer.9.output.dense.weight"), "bert.encoder.layer.9.output.dense.weight"),
    "a norm of the embeddings": (extra("bert.embeddings.norm.weight"), "bert.embeddings.norm.weight"),
    "a second map in the head": (extra("classifier.dense.weight"), "classifier.dense.weight"),
    "a map behind the head": (extra("crf.transitions"), "crf.transitions"),
    "an adapter beside": (
        both(holding("adapter_config.json", '{"peft_type": "LORA"}'), holding("adapter_model.safetensors", "")), "merge_and_unload",
    ),
    "an adapter alone": (
        both(holding("adapter_config.json", "{}"), holding("adapter_model.safetensors", ""), without("config.json")),
        "merge_and_unload",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_a_checkpoint_is_named_when_it_is_opened(damage: str, checkpoint: Path) -> None:
    harm, says = DAMAGE[damage]
    open_model(str(checkpoint))
    harm(checkpoint)
    with pytest.raises(BadInput) as refused:
        open_model(str(checkpoint))
    said = str(refused.value)
    assert said.startswith(f"--teacher {checkpoint}")
    assert says in said
    assert "\n" not in said


def test_positions_that_transformers_does_not_have_are_refused(checkpoint: Path) -> None:
    stated(position_embedding_type="relative_key_query")(checkpoint)
    with pytest.raises(BadInput, match=r"position_embedding_type is relative_key_query|distance_embedding"):
        open_model(str(checkpoint))


TOKENIZER_DAMAGE: dict[str, tuple[Harm, str]] = {
    "cut": (cut("tokenizer.json", 50), "its tokenizer cannot be opened from tokenizer.json"),
    "one that its library gives up at": (
        stated("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": ""}), "cannot be opened",
    ),
    "more ids than rows": (add_tokens, "('lampstand'), but its embedding has only"),
    **{
        f"{file} {content[:2]!r}": (
            lambda folder, file=file, content=content: (folder / file).write_bytes(content), f"its {file} cannot be read ("
        )
        for file, content in [
            *(("tokenizer_config.json", each) for each in (b"", b"{", b"[]", b"\xef\xbb\xbf{}", b"[" * 100_000, POINTER.encode())),
            ("tokenizer_config.json", "{}".encode("utf-16")),
            ("special_tokens_map.json", b"{"),
            ("added_tokens.json", b"["),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("damage", TOKENIZER_DAMAGE)
def test_damage_of_a_tokenizer_is_named(damage: str, checkpoint: Path) -> None:
    harm, says = TOKENIZER_DAMAGE[damage]
    harm(checkpoint)
    with pytest.raises(BadInput) as refused:
        open_tokenizer(open_model(str(checkpoint)))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


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


@pytest.mark.parametrize("verb", ["evaluate", "finetune", "distill", "export", "profile", "run"])
def test_every_verb_refuses_a_damaged_checkpoint_before_it_writes(
    verb: str, checkpoint: Path, task_data: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("please refund the lamp\n", encoding="utf-8")
    (tmp_path / "whole").mkdir()
    shutil.copytree(checkpoint, tmp_path / "whole", dirs_exist_ok=True)
    for damage in ("weights cut in the middle", "an infinite weight", "cut", "more ids than rows"):
        harm, says = (DAMAGE | TOKENIZER_DAMAGE)[damage]
        shutil.copytree(tmp_path / "whole", checkpoint, dirs_exist_ok=True)
        harm(checkpoint)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BadInput) as refused:
            verbs(str(checkpoint), task_data, corpus, tmp_path / "out")[verb]()
        assert says.removesuffix(" from tokenizer.json") in str(refused.value)
        assert sorted(tmp_path.rglob("*")) == before


def test_what_times_a_checkpoint_names_its_damage(checkpoint: Path) -> None:
    (checkpoint / "model.onnx").touch()
    for damage in ("labels as a list", "an architecture that is a number", "a configuration that is a list"):
        harm, says = DAMAGE[damage]
        kept = (checkpoint / "config.json").read_bytes()
        harm(checkpoint)
        with pytest.raises(BadInput) as refused:
            task_of(checkpoint / "model.onnx")
        assert says in str(refused.value)
        (checkpoint / "config.json").write_bytes(kept)
    cut("model.safetensors", 20_000)(checkpoint)
    with pytest.raises(BadInput, match=r"candidate 'mine': .*classifier cannot be opened \(SafetensorError"):
        load_torch(Candidate("mine", "torch", "fp32", checkpoint, 1))


@pytest.fixture
def vocabulary_model(checkpoint: Path) -> Path:
    """The checkpoint with a head for masked words."""
    from transformers import AutoConfig, BertForMaskedLM

    torch.manual_seed(0)
    BertForMaskedLM(AutoConfig.from_pretrained(checkpoint)).save_pretrained(checkpoint)
    return checkpoint


HEAD = "cls.predictions.transform.dense.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.update({HEAD: held[HEAD][:-1].clone()}), f"they hold {HEAD} of shape"),
        (lambda held: held.pop(HEAD), f"its weights lack {HEAD}"),
        (lambda held: held.update({HEAD: held[HEAD].to(torch.int64)}), f"its weight {HEAD} is of type int64"),
    ],
)
def test_a_damaged_head_for_masked_words_is_refused(
    vocabulary_model: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    weights(change)(vocabulary_model)
    with pytest.raises(BadInput, match=re.escape(says)):
        open_model(str(vocabulary_model))


def test_weights_that_no_answer_needs_pass(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    unused = (
        "bert.embeddings.position_ids",
        "cls.predictions.bias",
        "qa_outputs.weight",
        "lm_head.dense.weight",
        "loss_fct.weight",
    )
    weights(lambda held: held.update({key: torch.ones(2, 2) for key in unused}))(checkpoint)
    weights(lambda held: held.update({"bert.embeddings.position_ids": torch.arange(64)[None]}))(checkpoint)
    for name in ("model_head.pkl", "optimizer.pt", "training_args.bin", "pytorch_model.bin"):
        (checkpoint / name).write_bytes(b"")
    assert open_model(str(checkpoint)).has_head
    assert "the folder holds model_head.pkl, which is not read" in caplog.text


def test_weights_of_a_head_pass_in_a_model_that_gets_a_new_one(checkpoint: Path, vocabulary_model: Path) -> None:
    weights(lambda held: [held.pop(key) for key in [*held] if key.startswith("cls.")])(vocabulary_model)
    open_model(str(vocabulary_model))
    extra("crf.transitions")(checkpoint)
    stated(architectures=["BertCrfForNer"])(checkpoint)
    assert not open_model(str(checkpoint)).has_head


def test_a_broken_lineage_is_named(checkpoint: Path) -> None:
    for broken in ("{", "[]"):
        (checkpoint / "lineage.json").write_text(broken, encoding="utf-8")
        with pytest.raises(BadInput, match=r"lineage\.json cannot be read"):
            read_lineage(checkpoint)


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
    stated(**FOREIGN[place])(checkpoint)
    stated("config.4.0.0.json", attn_implementation="someone/attention")(checkpoint)
    for opening in (
        lambda: open_model(str(checkpoint)),
        lambda: check_checkpoint(checkpoint, str(checkpoint)),
        lambda: load_torch(Candidate("mine", "torch", "fp32", checkpoint, 1)),
    ):
        with pytest.raises(BadInput, match="asks for the attention or experts of"):
            opening()


@pytest.mark.parametrize("own", ["eager", "sdpa", None])
def test_a_checkpoint_that_asks_for_attention_of_torch_opens(own: str | None, checkpoint: Path) -> None:
    stated(attn_implementation=own)(checkpoint)
    open_model(str(checkpoint))
    load_torch(Candidate("mine", "torch", "fp32", checkpoint, 1))


def test_a_vocabulary_without_a_mask_needs_no_row_for_it(checkpoint: Path, task_data: Path) -> None:
    said = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    words = said["model"]["vocab"]
    gone, last = words.pop("[MASK]"), max(words, key=lambda word: words[word])
    words[last] = gone
    said["added_tokens"] = [token for token in said["added_tokens"] if token["content"] != "[MASK]"]
    (checkpoint / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    (checkpoint / "vocab.txt").unlink()
    weights(lambda held: held.update({ROWS: held[ROWS][: len(words)].clone()}))(checkpoint)
    stated(vocab_size=len(words))(checkpoint)
    tokenizer = open_tokenizer(open_model(str(checkpoint)))
    assert tokenizer.token_to_id("[MASK]") is None
    assert max(tokenizer.encode("status of [MASK] mugs").ids) < len(words)
    stillroom.evaluate(str(checkpoint), task_data / "test.jsonl")
    check_checkpoint(checkpoint, "it")


def test_a_vocabulary_file_alone_gives_the_same_scores(whole: Path, checkpoint: Path, task_data: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()  # its vocabulary is there
    by_file, by_vocabulary = (stillroom.evaluate(str(f), task_data / "test.jsonl") for f in (whole, checkpoint))
    assert by_vocabulary | {"model": ""} == by_file | {"model": ""}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_this_user_may_not_read_is_not_called_damaged(
    name: str, tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != name)  # the superuser may read all
    with pytest.raises(BadInput, match=rf"^--teacher .*: this user may not read its {name}\. Allow it"):
        open_model(str(tiny_teacher))
