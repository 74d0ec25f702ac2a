"""Choosing texts that are worth labelling."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_task import examples, make_teacher, relations, write_rows

import stillroom as face
from compress import selecting
from compress.data.examples import Example
from compress.models.answering import open_answering
from compress.models.sentence_encoder import open_encoder, sentence_vectors
from compress.selecting import Nearest, distinct, margins
from compress.tasks import task_of
from serve.errors import BadInput


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def tuned(encoder: Path, task_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each of two tasks."""
    folder = tmp_path_factory.mktemp("tuned")
    settings: dict[str, Any] = {"epochs": 0.5, "patience": 0, "threads": 1}
    tasks = ("text-classification", "token-classification")
    return {task: face.finetune(encoder, task, task_data, folder / task, **settings) for task in tasks}


def data_with(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for name, rows in splits.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def texts_of(data: Path) -> list[str]:
    """The texts of all splits."""
    files = [data / f"{name}.jsonl" for name in ("train", "validation", "test")]
    return [row["text"] for file in files for row in chosen(file)]


def chosen(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_vector_is_the_mean_of_a_texts_tokens_whatever_is_beside_it(encoder: Path) -> None:
    opened = open_encoder(str(encoder))
    texts = [Example("please refund the lamp"), Example("a"), Example("a refund", "for the lamp")]
    found = sentence_vectors(opened, texts)
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(3), abs=1e-6)
    for text, vector in zip(texts, found, strict=True):
        encoding = opened.tokenizer.encode(text.text, text.text_pair)
        with torch.no_grad():
            states = opened.model.double()(
                input_ids=torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])
            )[0][0]
        opened.model.float()
        mean = states.mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)


def test_texts_like_the_labelled_ones_are_chosen_once(encoder: Path, task_data: Path, tmp_path: Path) -> None:
    strange = [{"text": f"zzz qqq xxx {i} ??? vvv {i * i}"} for i in range(60)]
    alike = examples(60, seed=21)
    test = json.loads((task_data / "test.jsonl").read_text().splitlines()[0])["text"]
    again = [{"text": f"  {test.upper()}!!"}, {"text": str(alike[0]["text"]).upper() + " ..."}]
    bank = write_rows(tmp_path / "bank.jsonl", [*strange, *alike, *again])
    out = tmp_path / "chosen.jsonl"
    settings = {"task": "text-classification", "encoder": str(encoder), "near_duplicate": 1, "threads": 1}
    told = face.select([bank], task_data, out, k=2, **settings)
    rows = chosen(out)
    assert told["texts"] == len(rows) > 10
    assert told["bank"] == 122
    known = {*texts_of(task_data)}
    others = [row for row in alike if row["text"] not in known]
    assert told["in_data"] == 60 - len(others) + 1
    assert told["repeated"] >= 1
    texts = [row["text"] for row in rows]
    assert len({text.casefold() for text in texts}) == len(texts)
    assert not known & set(texts)
    assert sum(text in {row["text"] for row in others} for text in texts) > 0.8 * len(texts)  # half of the bank
    assert [row["similarity"] for row in rows] == sorted((row["similarity"] for row in rows), reverse=True)
    assert told["least_similar"] == rows[-1]["similarity"]
    assert {row["like"] for row in rows} <= known


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_uncertain_keeps_the_texts_with_the_smallest_margins(
    encoder: Path, tuned: dict[str, Path], task_data: Path, tmp_path: Path, task: str
) -> None:
    bank = write_rows(tmp_path / "bank.jsonl", examples(80, seed=22))
    settings = {"task": task, "encoder": str(encoder), "k": 3, "near_duplicate": 1, "threads": 1}
    face.select([bank], task_data, tmp_path / "all.jsonl", **settings)
    face.select([bank], task_data, tmp_path / "few.jsonl", **settings, uncertain=7, checkpoint=str(tuned[task]))
    everything, few = chosen(tmp_path / "all.jsonl"), chosen(tmp_path / "few.jsonl")
    model = open_answering(str(tuned[task]), task_of)
    lead = margins(model, [Example(row["text"]) for row in everything])
    expected = [everything[i]["text"] for i in np.argsort(lead, kind="stable")[:7]]
    assert [row["text"] for row in few] == expected
    assert [row["margin"] for row in few] == pytest.approx(sorted(lead)[:7], abs=1e-3)
    # The answers of the model, one text at a time, in float64.
    for row in few[:3]:
        encoding = model.tokenizer.encode(row["text"])
        with torch.no_grad():
            logits = model.model.double()(input_ids=torch.tensor([encoding.ids])).logits[0]
        model.model.float()
        if task == "token-classification":
            first = [i for i, w in enumerate(encoding.word_ids) if w is not None and w != encoding.word_ids[i - 1]]
            logits = logits[first]
        two = logits.reshape(-1, logits.shape[-1]).softmax(-1).topk(2).values
        assert row["margin"] == pytest.approx((two[:, 0] - two[:, 1]).mean().item(), abs=1e-3)


def test_bad_banks_and_settings_are_refused(encoder: Path, task_data: Path, tmp_path: Path) -> None:
    settings = {"task": "text-classification", "encoder": str(encoder)}
    there = tmp_path / "there.jsonl"
    there.write_text("mine\n")
    with pytest.raises(BadInput) as refused:
        face.select(["nowhere.txt"], task_data, there, **settings, uncertain=5)
    for fault in ("nowhere.txt", "--uncertain needs --with", "there.jsonl already exists"):
        assert fault in str(refused.value)
    assert there.read_text() == "mine\n"
    with pytest.raises(BadInput, match="has no text that --like"):
        face.select([task_data / "train.jsonl"], task_data, tmp_path / "out.jsonl", **settings)
    rows = [{"text": row["text"], "text_pair": "hello", "label": row["label"]} for row in examples(40, seed=1)]
    pairs = data_with(tmp_path / "pairs", train=rows, test=rows[:20])
    with pytest.raises(BadInput, match="240 of 240 rows are single texts, and --like has pairs"):
        face.select([task_data / "train.jsonl"], pairs, tmp_path / "out.jsonl", **settings)
    bank = write_rows(tmp_path / "bank.jsonl", [{"text": f"refund {i}", "text_pair": "thank you"} for i in range(9)])
    told = face.select([bank], pairs, tmp_path / "out.jsonl", **settings, near_duplicate=1, threads=1)
    assert told["texts"] == len(chosen(tmp_path / "out.jsonl"))
    assert all(row["text_pair"] == "thank you" for row in chosen(tmp_path / "out.jsonl"))
    with pytest.raises(BadInput, match="9 of 9 rows are pairs, and --like has single texts"):
        face.select([bank], task_data, tmp_path / "other.jsonl", **settings)
    marked = data_with(tmp_path / "marked", train=relations(40, seed=40), test=relations(20, seed=20))
    with pytest.raises(BadInput, match="has relations"):
        face.select([task_data / "train.jsonl"], marked, tmp_path / "other.jsonl", **settings)
    config = json.loads((encoder / "config.json").read_text())
    decoder = tmp_path / "decoder"
    shutil.copytree(encoder, decoder)
    (decoder / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    with pytest.raises(BadInput, match=r"is an encoder and decoder \(bert\)"):
        face.select([bank], pairs, tmp_path / "other.jsonl", **settings | {"encoder": str(decoder)})


def test_a_model_with_other_labels_is_refused(
    encoder: Path, tuned: dict[str, Path], task_data: Path, tmp_path: Path
) -> None:
    bank = write_rows(tmp_path / "bank.jsonl", examples(9, seed=22))
    rows = {name: chosen(task_data / f"{name}.jsonl") for name in ("train", "validation", "test")}
    mine = {name: [row | {"label": f"my {row['label']}"} for row in of] for name, of in rows.items()}
    others = data_with(tmp_path / "others", **mine)
    given = {"encoder": str(encoder), "uncertain": 3, "checkpoint": str(tuned["text-classification"])}
    with pytest.raises(BadInput, match="which lack my praise"):
        face.select([bank], others, tmp_path / "out.jsonl", task="text-classification", **given)
    with pytest.raises(BadInput, match="is a model of text-classification, and --task is token-classification"):
        face.select([bank], task_data, tmp_path / "out.jsonl", task="token-classification", **given)


def test_repeats_are_told_by_letters_digits_and_symbols(encoder: Path, task_data: Path, tmp_path: Path) -> None:
    scripts, numbers = ["दिन", "दान", "दीन"], ["10.0 refund", "100 refund"]
    differ = [*scripts, *numbers, "great 😀", "great 😡", "C++ lamp", "C lamp", "???", "!"]
    same = ["Caf\u00e9 lamp", "cafe\u0301, lamp!", " CAF\u00c9  LAMP"]
    bank = tmp_path / "bank.txt"
    bank.write_text("\n".join([*differ, *same]) + "\n", encoding="utf-8")
    told = face.select(
        [bank], task_data, tmp_path / "out.jsonl", task="text-classification", encoder=str(encoder), k=20, near_duplicate=1,
        threads=1,
    )  # fmt: skip
    assert (told["bank"], told["in_data"], told["repeated"]) == (14, 0, 2)


def test_near_duplicates_of_texts_of_the_data_are_left_out(encoder: Path, task_data: Path, tmp_path: Path) -> None:
    bank = write_rows(tmp_path / "bank.jsonl", examples(60, seed=21))
    settings = {"task": "text-classification", "encoder": str(encoder), "k": 2, "threads": 1}
    every = face.select([bank], task_data, tmp_path / "all.jsonl", **settings, near_duplicate=1)
    limit = chosen(tmp_path / "all.jsonl")[len(chosen(tmp_path / "all.jsonl")) // 3]["similarity"]
    fewer = face.select([bank], task_data, tmp_path / "few.jsonl", **settings, near_duplicate=limit)
    assert fewer["texts"] < every["texts"]
    opened = open_encoder(str(encoder))
    known = sentence_vectors(opened, [Example(text) for text in texts_of(task_data)])
    found = sentence_vectors(opened, [Example(row["text"]) for row in chosen(tmp_path / "few.jsonl")])
    assert (found @ known.T).max() <= limit + 1e-5


def unit(rows: int, seed: int) -> np.ndarray:
    """Random vectors of length 1."""
    drawn = np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.mark.parametrize("shard", [7, 64, 300])
def test_the_nearest_do_not_depend_on_how_the_bank_is_cut(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "BLOCK", 5)
    queries, bank = unit(12, 0), unit(300, 1)
    nearest = Nearest(queries, 4)
    for first in range(0, len(bank), shard):
        nearest.add(first, bank[first : first + shard])
    products = queries.astype(np.float64) @ bank.astype(np.float64).T
    best = np.argsort(-products, axis=1)[:, :4]
    chosen = nearest.chosen()
    assert {place for place, _, _ in chosen} == set(best.flatten().tolist())
    cosines = [cosine for _, _, cosine in chosen]
    assert cosines == sorted(cosines, reverse=True)
    for place, query, cosine in chosen:
        among = [q for q in range(12) if place in best[q]]
        assert query == max(among, key=lambda q: products[q, place])
        assert cosine == pytest.approx(products[query, place], abs=1e-6)


def test_a_bank_with_fewer_texts_than_are_asked_for_is_chosen_whole() -> None:
    nearest = Nearest(unit(3, 0), 10)
    nearest.add(0, unit(4, 1))
    assert sorted(place for place, _, _ in nearest.chosen()) == [0, 1, 2, 3]


def test_of_near_duplicates_the_first_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "BLOCK", 4)
    vectors = unit(10, 2)
    vectors[3], vectors[9] = vectors[0], vectors[5]
    none = np.zeros((0, 16), dtype=np.float32)
    kept = distinct(vectors, 0.99, none)
    assert kept == [0, 1, 2, 4, 5, 6, 7, 8]
    products = vectors[kept] @ vectors[kept].T - np.eye(len(kept))
    assert products.max() <= 0.99
    known = np.concatenate([unit(9, 5), vectors[[2, 7]]])
    assert distinct(vectors, 0.99, known) == [0, 1, 4, 5, 6, 8]
