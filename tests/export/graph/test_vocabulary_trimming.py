import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from export.graph.exporter import load_answering_model, quiet
from export.graph.vocabulary_trimming import trim_vocabulary, trimming_to
from serve.errors import BadInput

SENTENCES = [
    "please book a table in rome for two on friday",
    "fly to new york city tomorrow morning and cancel my order",
    "the café in zürich opens at nine, the other one at ten",
    "what is the weather like in helsinki this week?",
    "tell me about the history of the railway between basel and turin",
    "мир и война",
]
CORPUS = SENTENCES[:3]
KINDS = ["WordPiece", "BPE", "Unigram"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def trained(kind: str, special: list[str] = SPECIAL) -> Tokenizer:
    """A tokenizer of `kind` that knows the words of the sentences above; Unigram also ψω, but neither of its letters.

    Unigram's special tokens come last, so that trimming gives them other ids.
    """
    tokenizer = Tokenizer({"WordPiece": models.WordPiece, "BPE": models.BPE, "Unigram": models.Unigram}[kind]())
    settings: dict[str, Any] = {"vocab_size": 600, "special_tokens": special, "show_progress": False}
    if kind == "WordPiece":
        tokenizer.model = models.WordPiece(unk_token="<unk>")  # noqa: S106
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(**settings))
    elif kind == "BPE":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(SENTENCES, trainers.BpeTrainer(**settings, initial_alphabet=alphabet))
    else:
        words = [f"▁{word}" for word in sorted({word for sentence in SENTENCES for word in sentence.split()} | {"ψω"})]
        letters = sorted({letter for sentence in SENTENCES for letter in sentence.replace(" ", "▁")})
        pieces = dict.fromkeys(words, -6.0) | dict.fromkeys(letters, -9.0) | dict.fromkeys(special, 0.0)
        tokenizer.model = models.Unigram(list(pieces.items()), unk_id=list(pieces).index("<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.add_special_tokens(special)
    pairs = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = (
        processors.RobertaProcessing(pairs[1], pairs[0], add_prefix_space=False)
        if kind == "BPE"
        else processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)
    )
    return tokenizer


def write(folder: Path, kind: str, special: list[str] = SPECIAL) -> Path:
    """A small classifier with that tokenizer, as `save_pretrained` lays it out: a RoBERTa for BPE, else a BERT."""
    import torch
    import transformers

    tokenizer = trained(kind, special)
    family = "Roberta" if kind == "BPE" else "Bert"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=80 + tokenizer.get_vocab_size(), initializer_range=0.3,
        pad_token_id=tokenizer.token_to_id("<pad>"), bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=tokenizer.token_to_id("</s>"),
    )  # fmt: skip
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask")}
    named |= {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    with quiet():
        getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return {kind: write(folder / kind, kind) for kind in KINDS}


def copied(checkpoint: Path, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def spelled(pieces: list[str]) -> str:
    """What the pieces of a text say together."""
    return "".join(piece.removeprefix("##") for piece in pieces)


def tokenizer_of(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def logits_of(checkpoint: Path, texts: list[str]) -> Any:
    """(texts, labels), each text alone."""
    import torch

    model = load_answering_model(checkpoint)
    tokenizer = tokenizer_of(checkpoint)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokenizer.encode(text).ids])).logits for text in texts])


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_are_split_and_answered_as_before(checkpoints: dict[str, Path], tmp_path: Path, kind: str) -> None:
    import torch

    whole = checkpoints[kind]
    small = copied(whole, tmp_path / "small")
    report = trim_vocabulary(small, CORPUS, CORPUS)
    before, after = tokenizer_of(whole), tokenizer_of(small)
    for text in CORPUS:
        assert after.encode(text).tokens == before.encode(text).tokens
    torch.testing.assert_close(logits_of(small, CORPUS), logits_of(whole, CORPUS), atol=1e-6, rtol=0)
    assert (report.texts, report.texts_split_otherwise, report.unknown) == (3, 0, report.unknown_before)
    assert report.read == sum(len(before.encode(text, add_special_tokens=False)) + 2 for text in CORPUS)
    assert report.newly_unknown == ()
    assert (report.tokens, report.kept) == (before.get_vocab_size(), after.get_vocab_size())
    assert report.kept < report.tokens
    assert report.rows_bytes == (report.tokens - report.kept) * 32 * 4
    saved = (whole / "model.safetensors").stat().st_size - (small / "model.safetensors").stat().st_size
    assert saved == pytest.approx(report.rows_bytes, abs=64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trimmed_checkpoint_opens_in_transformers_with_its_special_tokens(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    small = copied(checkpoints[kind], tmp_path / "small")
    trim_vocabulary(small, CORPUS, [])
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(small)
        tokenizer = AutoTokenizer.from_pretrained(small)
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().num_embeddings
    assert model.config.pad_token_id == tokenizer.pad_token_id == tokenizer_of(small).token_to_id("<pad>")
    for name, token in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"), ("mask", "<mask>"), ("sep", "</s>")):
        index = getattr(tokenizer, f"{name}_token_id")
        assert tokenizer.convert_ids_to_tokens(index) == token
        assert getattr(model.config, f"{name}_token_id", None) in (None, index)
    ids = tokenizer(CORPUS[0])["input_ids"]
    assert ids == tokenizer_of(small).encode(CORPUS[0]).ids
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert max(ids) < model.config.vocab_size
    # What other readers of the file go by.
    document = json.loads((small / "tokenizer.json").read_text(encoding="utf-8"))
    assert {token["content"]: token["id"] for token in document["added_tokens"]} == {
        token: tokenizer_of(small).token_to_id(token) for token in SPECIAL
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_that_was_not_kept_is_spelled(checkpoints: dict[str, Path], tmp_path: Path, kind: str) -> None:
    small = copied(checkpoints[kind], tmp_path / "small")
    held_out = ["the railway to helsinki", "jinx"]
    report = trim_vocabulary(small, CORPUS, held_out)
    before, after = tokenizer_of(checkpoints[kind]), tokenizer_of(small)
    for text in held_out:
        told, again = (tokenizer.encode(text).tokens for tokenizer in (before, after))
        assert spelled(again) == spelled(told)
        assert again.count("<unk>") == told.count("<unk>")
    assert len(after.encode(held_out[0])) > len(before.encode(held_out[0]))
    assert report.texts_split_otherwise >= 1
    assert report.unknown == report.unknown_before
    assert report.newly_unknown == ()


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_words_that_became_unknown_are_counted_and_shown(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    # A vocabulary that has a word but not its letters, as large ones have.
    odd, whole = copied(checkpoints[kind], tmp_path / "odd"), "ψω"
    if kind == "WordPiece":
        document = json.loads((odd / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = document["model"]["vocab"]
        document["model"]["vocab"] = {whole if piece == "railway" else piece: i for piece, i in vocabulary.items()}
        (odd / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    held_out = [f"book {whole}", "book a table"]
    report = trim_vocabulary(odd, CORPUS, held_out)
    after = tokenizer_of(odd)
    # By their ids: Unigram calls an unknown token by what stands in the text.
    found = sum(after.encode(text).ids.count(after.token_to_id("<unk>")) for text in held_out)
    assert found > 0
    assert (report.unknown_before, report.unknown) == (0, found)
    assert [piece.strip() for piece in report.newly_unknown] == [whole]
    assert report.texts_split_otherwise == 1


def test_an_unused_token_before_the_padding_keeps_its_id_as_positions_count_from_there(tmp_path: Path) -> None:
    folder = write(tmp_path / "roberta", "BPE", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    pad = next(token["id"] for token in document["added_tokens"] if token["content"] == "<pad>")
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] >= pad]
    trimming = trimming_to(CORPUS, document, "it", pad_id=pad)
    assert [trimming.new_ids[index] for index in range(pad + 1)] == list(range(pad + 1))


def test_a_padding_whose_id_would_move_is_refused_where_positions_are_numbered_from_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "roberta", "BPE", ["<s>", "</s>", "<unk>", "<mask>"])
    # The padding's token comes last, behind tokens that trimming takes away.
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    last = max(token["id"] for token in document["added_tokens"])
    assert "<pad>" in [token["content"] for token in document["added_tokens"]]
    assert last >= len(vocabulary) - 1
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": last, "vocab_size": last + 1}))
    from safetensors.numpy import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    table = weights["roberta.embeddings.word_embeddings.weight"]
    weights["roberta.embeddings.word_embeddings.weight"] = table.repeat(2, axis=0)[: last + 1]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    before = contents(folder)
    with pytest.raises(BadInput, match=f"change that id from {last} to "):
        trim_vocabulary(folder, CORPUS, [])
    assert contents(folder) == before


def test_words_that_an_added_token_cuts_in_two_are_split_as_before(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    small = copied(checkpoints["BPE"], tmp_path / "small")
    before = tokenizer_of(small)
    before.add_tokens(["o"])  # a piece that it has already, now cut out of every word
    before.save(str(small / "tokenizer.json"))
    assert "o" in before.encode("tomorrow").tokens
    whole = copied(small, tmp_path / "whole")
    report = trim_vocabulary(small, CORPUS, CORPUS)
    after = tokenizer_of(small)
    assert report.kept < report.tokens
    assert report.texts_split_otherwise == 0
    for text in CORPUS:
        assert after.encode(text).tokens == before.encode(text).tokens
    assert float((logits_of(small, CORPUS) - logits_of(whole, CORPUS)).abs().max()) < 1e-6


def test_texts_that_would_be_split_in_another_way_are_counted_and_the_first_is_shown(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    # What Unigram takes for an unknown letter depends on its least likely piece, which trimming takes away.
    odd = copied(checkpoints["Unigram"], tmp_path / "odd")
    document = json.loads((odd / "tokenizer.json").read_text(encoding="utf-8"))
    likely = {"▁railway": ("ψb", -500.0), "▁history": ("bc", -1.0), "▁weather": ("nowhere", -1000.0), "c": ("c", -20.0)}
    document["model"]["vocab"] = [likely.get(piece, (piece, score)) for piece, score in document["model"]["vocab"]]
    (odd / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    before = contents(odd)
    with pytest.raises(BadInput, match=r"1 of the 3 texts .* 'a ψbc'"):
        trim_vocabulary(odd, ["book a table", "a ψbc", "bc"], [])
    assert contents(odd) == before


def test_texts_without_tokens_and_strange_tokenizers_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    small = copied(checkpoints["WordPiece"], tmp_path / "small")
    with pytest.raises(BadInput, match="no tokens"):
        trim_vocabulary(small, [], CORPUS)
    document = json.loads((small / "tokenizer.json").read_text(encoding="utf-8"))
    document["model"] = {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}
    (small / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match="WordLevel"):
        trim_vocabulary(small, CORPUS, CORPUS)


def test_a_trimmed_checkpoint_can_be_trimmed_again(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    small = copied(checkpoints["BPE"], tmp_path / "small")
    first = trim_vocabulary(small, CORPUS, [])
    before = contents(small)
    again = trim_vocabulary(small, CORPUS, [])
    assert (again.tokens, again.kept, again.rows_bytes) == (first.kept, first.kept, 0)
    assert contents(small) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_of_a_given_size_keeps_the_tokens_that_texts_need_most(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    whole = tokenizer_of(checkpoints[kind])
    document = json.loads(whole.to_str())
    # The first sentence is frequent, the third is not.
    texts = [CORPUS[0]] * 20 + [CORPUS[1]] * 3 + [CORPUS[2]]
    everything = len(trimming_to(texts, document, "it", pad_id=1).new_ids)
    with pytest.raises(BadInput, match=r"a vocabulary of 5 tokens has no room for the \d+ special tokens") as refused:
        trimming_to(texts, document, "it", pad_id=1, size=5)
    least = int(str(refused.value).split("for the ")[1].split(" ")[0])
    size = least + (everything - least) // 2
    small = copied(checkpoints[kind], tmp_path / "small")
    report = trim_vocabulary(small, texts, CORPUS, size)
    after = tokenizer_of(small)
    assert report.kept == after.get_vocab_size() <= size
    assert after.encode(CORPUS[0]).tokens == whole.encode(CORPUS[0]).tokens
    assert report.texts_split_otherwise >= 1
    lengths = [len(tokenizer.encode(CORPUS[2])) for tokenizer in (whole, after)]
    assert lengths[0] < lengths[1]
    # Nothing is lost: what is not kept is spelled.
    assert spelled(after.encode(CORPUS[2]).tokens) == spelled(whole.encode(CORPUS[2]).tokens)
    assert report.unknown == report.unknown_before
    assert logits_of(small, CORPUS).isfinite().all()
    # As many as the texts need are all that they need.
    assert len(trimming_to(texts, document, "it", pad_id=1, size=everything).new_ids) == everything
    first, second = (trimming_to(texts, document, "it", pad_id=1, size=size).after for _ in range(2))
    assert first == second


def test_pieces_that_rare_words_share_take_their_place() -> None:
    """Ten rare words of one stem: none is frequent, and the stem is."""
    words = [f"train{end}" for end in ("ing", "er", "ed", "s", "ee", "able", "load", "man", "spotter", "x")]
    letters = "trainegdsblompx"
    pieces = ["[PAD]", "[UNK]", *letters, *(f"##{letter}" for letter in letters), "train", "##ing", "##er", "##ed"]
    vocabulary = {piece: i for i, piece in enumerate([*dict.fromkeys(pieces), *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    document = json.loads(tokenizer.to_str())
    trimmed = trimming_to(words, document, "it", pad_id=0, size=32 + 2)
    kept = set(trimmed.after["model"]["vocab"])
    assert "train" in kept
    assert not kept & set(words)
