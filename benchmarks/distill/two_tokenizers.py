"""Whether a student may read text in another way than its teacher: the same student with the teacher's tokenizer and with one of its own.

    python benchmarks/distill/two_tokenizers.py --data FOLDER --answers answers.jsonl --tokenizer TEACHER --work FOLDER --out two.json

FOLDER has labelled entities, --answers are a teacher's (`stillroom label --with TEACHER`). Both students are a 3x384 BERT whose layers
start from the same random weights; one reads the pieces of the teacher's tokenizer, the other those of a WordPiece vocabulary that is
trained here on the texts of train. Each learns labels and answers in --steps steps, by `run --teacher-labels --start`. Everything
finished in --work is kept.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

import stillroom
from compress.data.splits import read_splits
from compress.models.shapes import STUDENTS
from compress.tasks import task_named
from latency.measure.machine import machine_facts

TASK, BATCH, WORDS, LONGEST = "token-classification", 32, 4_000, 128
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def own_tokenizer(texts: list[str]) -> Any:
    """A WordPiece tokenizer of the words of `texts`."""
    trainer = BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(texts, vocab_size=WORDS, min_frequency=2, special_tokens=SPECIAL, show_progress=False)
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    made = PreTrainedTokenizerFast(tokenizer_object=trainer._tokenizer, **names)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, made.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")],
    )
    return made


def body(tokenizer: Any, folder: Path) -> Path:
    """A random student in `folder`; its layers do not depend on the tokenizer."""
    shape = STUDENTS["3x384"]
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        intermediate_size=shape.ffn, max_position_embeddings=LONGEST, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    layers = BertModel(BertConfig(**(config.to_dict() | {"vocab_size": 8, "pad_token_id": 0}))).encoder.state_dict()
    torch.manual_seed(1)
    model = BertModel(config)
    model.encoder.load_state_dict(layers)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    """Train both students and write their scores."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--data", type=Path, required=True)
    reader.add_argument("--answers", required=True)
    reader.add_argument("--tokenizer", required=True)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--steps", type=int, default=2_000)
    reader.add_argument("--threads", type=int, default=1)
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    texts = [example.text for example in read_splits(str(given.data), task_named(TASK)).train]
    tokenizers = {
        "the teacher's": AutoTokenizer.from_pretrained(given.tokenizer),
        "its own": own_tokenizer(texts),
    }
    rows = []
    for number, (name, tokenizer) in enumerate(tokenizers.items()):
        pieces = [ids for text in texts for ids in tokenizer(text, add_special_tokens=False)["input_ids"]]
        document = stillroom.run(
            teacher_labels=[given.answers], start=str(body(tokenizer, given.work / f"body-{number}")), task=TASK,
            data=str(given.data), out=str(given.work / f"student-{number}"), student="3x384", soft_weight=0.9, undistilled=False,
            student_epochs=round(given.steps * BATCH / len(texts)), batch=BATCH, teacher_gate=0.0, gate=0.0, latency_seconds=1.0,
            threads=given.threads,
        )  # fmt: skip
        told = {"tokenizer": name, "vocabulary": len(tokenizer), "pieces_per_text": len(pieces) / len(texts)}
        rows.append(told | {"scores": document["scores"]})
        print(json.dumps(rows[-1]), flush=True)
    document = {"machine": machine_facts(), "steps": given.steps, "rows": rows}
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
