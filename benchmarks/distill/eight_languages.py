"""One student of many languages: beside a student for each, and where only some languages have labels.

    python benchmarks/distill/eight_languages.py --work FOLDER --out languages.json

Messages in eight languages are made of templates and of the names that Babel has of months, territories and currencies
(`tests/languages.py`), which are the entities. The teacher is a small XLM-RoBERTa of random weights, whose Unigram tokenizer is trained
here on those messages; it is fine-tuned on all languages. Each student starts from its layers as they were before that. Trained are, all
on labels and on the teacher's soft labels:

    joint        one student of all languages, in --steps steps
    separate     a student for each language, in an eighth of the steps each, so that all take as many steps as the joint one
    three        labels in three languages, and the teacher's answers to the texts of the other five, in --steps steps
    three alone  labels in three languages, without the others' texts

--out has the score of each language on test. Everything finished in --work is kept.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from selecting import body as student_body
from tokenizers import SentencePieceUnigramTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from languages import TEMPLATES, messages

import stillroom
from compress.models.shapes import Shape
from latency.measure.machine import machine_facts

TASK, BATCH, THREE = "token-classification", 16, ("en", "ru", "hi")
EACH = {"train": 300, "validation": 60, "test": 200}  # messages of a language
SPECIAL = {"bos": "<s>", "cls": "<s>", "pad": "<pad>", "eos": "</s>", "sep": "</s>", "unk": "<unk>"}


def written(file: Path, languages: tuple[str, ...], split: str) -> Path:
    """`file`, with the messages of some languages."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for name in languages for row in messages(name, EACH[split], seed=len(split))]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def data_of(folder: Path, languages: tuple[str, ...]) -> Path:
    """A folder whose train and validation have some languages."""
    for split in ("train", "validation"):
        written(folder / f"{split}.jsonl", languages, split)
    written(folder / "test.jsonl", tuple(TEMPLATES), "test")
    return folder


def body(folder: Path) -> Path:
    """The teacher before any training."""
    if not folder.exists():
        texts = [str(row["text"]) for name in TEMPLATES for row in messages(name, 1_000, seed=1)]
        trained = SentencePieceUnigramTokenizer()
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        how = {"vocab_size": 6_000, "special_tokens": special, "unk_token": "<unk>", "show_progress": False}
        trained.train_from_iterator(texts, **how)
        trained._tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        names = {f"{name}_token": token for name, token in SPECIAL.items()}
        PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **names).save_pretrained(folder)
        torch.manual_seed(0)
        config = XLMRobertaConfig(
            vocab_size=trained.get_vocab_size(), hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=256, max_position_embeddings=130, type_vocab_size=1, pad_token_id=1, initializer_range=0.05,
        )  # fmt: skip
        XLMRobertaModel(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Train all and write their scores."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--steps", type=int, default=1_200)
    reader.add_argument("--threads", type=int, default=1)
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    names, work = tuple(TEMPLATES), given.work
    everything = data_of(work / "all", names)
    test = everything / "test.jsonl"

    def trained(name: str, model: Path, data: Path, steps: int, texts: int, **more: Any) -> Path:
        out = work / f"{name}-model"
        if not out.exists():
            stillroom.finetune(
                model, TASK, data, out, epochs=steps * BATCH / texts, batch=BATCH, patience=0, learning_rate=1e-3,
                threads=given.threads, **more,
            )  # fmt: skip
        return out

    def scores(model: Path) -> dict[str, float]:
        document = stillroom.evaluate(str(model), test)
        return {row["language"]: round(row["value"], 4) for row in document["languages"]}

    whole = len(names) * EACH["train"]
    teacher = trained("teacher", body(work / "body"), everything, 2 * given.steps, whole)
    start = student_body(str(work / "body"), work / "student-body", Shape(2, 128, 4, 256))
    rows = {"teacher": scores(teacher)}
    answers = work / "answers.jsonl"
    if not answers.exists():
        others = tuple(name for name in names if name not in THREE)
        stillroom.label(
            [written(work / "others.jsonl", others, "train")], answers, checkpoint=str(teacher), threads=given.threads
        )
    soft = {"teacher": str(teacher), "soft_weight": 0.9}
    rows["joint"] = scores(trained("joint", start, everything, given.steps, whole, **soft))
    rows["separate"] = {
        name: scores(
            trained(name, start, data_of(work / name, (name,)), given.steps // len(names), EACH["train"], **soft)
        )[name]
        for name in names
    }
    three = data_of(work / "three", THREE)
    count = len(THREE) * EACH["train"]
    # Of 1,500 answers and 900 labelled texts: the steps are counted by the latter.
    rows["three"] = scores(trained("three", start, three, given.steps, count, teacher_labels=[str(answers)]))
    rows["three alone"] = scores(trained("three-alone", start, three, given.steps, count))
    for row in rows.values():
        row["mean"] = round(sum(row.values()) / len(row), 4)
    document = {"machine": machine_facts(), "steps": given.steps, "rows": rows}
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
