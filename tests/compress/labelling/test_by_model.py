"""`label --with`: a model's answers to texts as rows, whole after a kill, from any family."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interruptions import interrupted_at
from small_task import examples, make_teacher, make_tokenizer, relations, write_rows

import stillroom as face
from compress.data.examples import Example
from compress.evaluation import predictions
from compress.labelling import label as labelling
from compress.labelling.label import ask_model
from compress.models.answering import open_answering
from compress.models.pretrained import check_length
from compress.tasks import task_of
from serve.errors import BadInput


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(tmp_path_factory.mktemp("model") / "classes", "BertForSequenceClassification")


def with_head(folder: Path, kind: str, **changes: Any) -> Path:
    """A tiny BERT with a new head of three labels."""
    import transformers

    make_teacher(
        folder, id2label={0: "O", 1: "B-city", 2: "I-city"}, label2id={"O": 0, "B-city": 1, "I-city": 2}, **changes
    )
    torch.manual_seed(1)
    config = transformers.BertConfig.from_pretrained(folder)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_each_text_gets_the_probabilities_of_the_model_and_is_asked_once(classifier: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = examples(30, seed=1)
    document = face.label(
        [write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", rows[:5])],
        tmp_path / "out.jsonl",
        checkpoint=str(classifier),
        threads=1,
    )
    found = rows_of(tmp_path / "out.jsonl")
    assert (document["texts"], document["task"], document["unanswered"]) == (30, "text-classification", 0)
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    with torch.no_grad():
        for row in found:
            (expected,) = model(**tokenizer(row["text"], return_tensors="pt")).logits.softmax(-1).tolist()
            said = [row["labels"][name] for name in ("O", "B-city", "I-city")]
            np.testing.assert_allclose(said, expected, rtol=1e-4)
            assert [*row["labels"].values()] == sorted(row["labels"].values(), reverse=True)


def test_pairs_and_relations_are_asked_as_they_are_and_keep_their_parts(classifier: Path, tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"text": "a", "text_pair": "b"}, {"text": "a", "text_pair": "c"}])
    marked = write_rows(tmp_path / "marked.jsonl", relations(3, seed=0))
    face.label([pairs, marked], checkpoint=str(classifier), out=tmp_path / "out.jsonl", threads=1)
    found = rows_of(tmp_path / "out.jsonl")
    assert [row.get("text_pair") for row in found] == ["b", "c", None, None, None]
    assert found[0]["labels"] != found[1]["labels"]
    given = [json.loads(line) for line in marked.read_text().splitlines()]
    assert [(row["head"], row["tail"]) for row in found[2:]] == [(row["head"], row["tail"]) for row in given]


@pytest.mark.parametrize("suffix", [".conll", ".txt", ".jsonl"])
def test_words_get_the_probabilities_of_their_tags(tmp_path: Path, suffix: str) -> None:
    model = with_head(tmp_path / "tags", "BertForTokenClassification")
    texts = tmp_path / f"texts{suffix}"
    texts.write_text(
        {".conll": "the O\nlamp O\n\nOslo B-x\n", ".txt": "the lamp\nOslo\n"}.get(
            suffix, '{"tokens": ["the", "lamp"]}\n{"tokens": ["Oslo"], "tags": ["B-x"]}\n'
        )
    )
    face.label([texts], checkpoint=str(model), out=tmp_path / "out.jsonl", threads=1)
    found = rows_of(tmp_path / "out.jsonl")
    assert [row["text"] for row in found] == ["the lamp", "Oslo"]
    assert [[(word["start"], word["end"]) for word in row["words"]] for row in found] == [[(0, 3), (4, 8)], [(0, 4)]]
    for row in found:
        for word in row["words"]:
            assert set(word["tags"]) == {"O", "B-city", "I-city"}
            assert sum(word["tags"].values()) == pytest.approx(1, abs=1e-5)


SMALL = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
# What small configurations of each family need.
ANSWERING: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "electra": {"embedding_size": 32},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "type_vocab_size": 0},
    "mpnet": {"type_vocab_size": 0},
    "modernbert": {"type_vocab_size": 0},
    "albert": {"embedding_size": 16},
    "big_bird": {"attention_type": "original_full"},
    "camembert": {},
    "convbert": {"embedding_size": 32},
    "data2vec-text": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ernie": {},
    "eurobert": {"num_key_value_heads": 4, "head_dim": 8},
    "jina_embeddings_v3": {},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32},
    "nomic_bert": {},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roformer": {"embedding_size": 32},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
}


HEADS = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification")


# Students are made of the first seven families; of the others heads are tried in turns.
@pytest.mark.parametrize(
    ("family", "head"),
    [(name, head) for i, name in enumerate(ANSWERING) for j, head in enumerate(HEADS) if i < 7 or (i + j) % 2],
)
def test_a_model_of_any_family_answers(tmp_path: Path, family: str, head: str) -> None:
    import transformers

    if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    folder = tmp_path / family
    make_tokenizer(folder)
    config = transformers.AutoConfig.for_model(family, **SMALL | ANSWERING[family])
    getattr(transformers, head).from_config(config).save_pretrained(folder)
    rows = [*examples(3, seed=1), {"text": "refund " * 200}]  # one is longer than the model reads
    face.label([write_rows(tmp_path / "a.jsonl", rows)], tmp_path / "out.jsonl", checkpoint=str(folder), threads=1)
    for row in rows_of(tmp_path / "out.jsonl"):
        for said in [row["labels"]] if "labels" in row else [word["tags"] for word in row["words"]]:
            assert sum(said.values()) == pytest.approx(1, abs=1e-5)


def test_killed_and_given_again_it_asks_only_what_is_missing_and_ends_with_the_same_bytes(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_rows(tmp_path / "a.jsonl", examples(50, seed=1))
    monkeypatch.setattr(labelling, "SHARD_TEXTS", 16)
    face.label([texts], checkpoint=str(classifier), out=tmp_path / "whole.jsonl", threads=1)
    asked: list[int] = []
    dying = interrupted_at(3, predictions.shared_row_logits, asked)
    monkeypatch.setattr(predictions, "shared_row_logits", dying)
    out = tmp_path / "killed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        face.label([texts], checkpoint=str(classifier), out=out, threads=1)
    assert not out.exists()
    with (tmp_path / "killed.jsonl.part").open("ab") as part:
        part.write(b'32\t{"text":"half a li')  # as a kill amid a write leaves it
    document = face.label([texts], checkpoint=str(classifier), out=out, threads=1)
    assert asked == [16, 16, 16, 16, 2]
    assert document["texts_before"] == 32
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("killed*")) == ["killed.jsonl", "killed.jsonl.lineage.json"]

    assert face.label([texts], checkpoint=str(classifier), out=out, threads=1)["texts_before"] == 50
    with pytest.raises(BadInput, match=r"killed.jsonl exists, and holds other answers than these"):
        face.label(
            [write_rows(tmp_path / "b.jsonl", examples(3, seed=2))], checkpoint=str(classifier), out=out, threads=1
        )


def test_all_faults_are_told_at_once_and_nothing_is_written(classifier: Path, tmp_path: Path) -> None:
    headless = make_teacher(tmp_path / "headless")
    with pytest.raises(BadInput) as refused:
        face.label(
            [tmp_path / "none.jsonl"], checkpoint=str(headless), out=tmp_path / "no folder" / "out.jsonl", threads=1
        )
    assert "has no head for a task: its architecture is BertModel" in str(refused.value)
    assert "which does not exist" in str(refused.value)
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n{"label": "x"}\n')
    with pytest.raises(BadInput) as refused:
        face.label(
            [tmp_path / "bad.jsonl", tmp_path / "a.doc"],
            checkpoint=str(classifier),
            out=tmp_path / "out.jsonl",
            threads=1,
        )
    for fault in ("line 1: `text` is int, not a string", "line 2: has no `text`", "a.doc is not a file"):
        assert fault in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "headless"]


def test_what_a_model_does_not_read_and_tags_without_an_outside_are_told(classifier: Path, tmp_path: Path) -> None:
    import transformers

    def told(model: Path, max_length: int = 0) -> str:
        said: list[str] = []
        texts = [Example("where is the lamp " * 30), Example("привет мир лампа"), Example("oslo")]
        list(
            ask_model(
                open_answering(str(model), task_of, max_length=max_length),
                texts,
                range(3),
                lambda each: said.append(each.text),
            )
        )
        return " ".join(said)

    said = told(classifier, 8)
    assert "1 text is longer than the 8 tokens that the model reads" in said
    assert "of the tokens in --input are unknown" in said
    model = make_teacher(tmp_path / "unnamed", num_labels=3)
    transformers.BertForTokenClassification(transformers.BertConfig.from_pretrained(model)).save_pretrained(model)
    assert "No tag of the model is O" in told(model)


def test_a_length_that_is_refused_says_whose_limit_it_is() -> None:
    with pytest.raises(BadInput, match=r"give 8 to 2,048 tokens, the most that stillroom reads at once"):
        check_length(2049, 2048, "a ModernBERT")
    with pytest.raises(BadInput, match=r"--max-length is 65; give 8 to 64 tokens, which a BERT can read\."):
        check_length(65, 64, "a BERT")
    check_length(0, 64, "a BERT")
