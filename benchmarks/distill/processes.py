"""Compare training in several processes with training in one: loss curves on the same batches, and their largest difference.

    python benchmarks/distill/processes.py --corpus text.txt [--steps 40] [--batch 16] [--processes 2] [--method minilmv2] [--dtype float64]

A small BERT with random weights is distilled into one half as deep, on real text. Dropout is 0, since each process draws its own.
There are three trainings: in one process, in one process that splits each batch into as many parts, and in several processes
joined by Gloo. Prints a JSON document.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from compress import distributed
from compress.data.corpus import CorpusText, chunks, masking_of
from compress.data.texts import read_texts
from compress.methods.catalogue import Sizes, stages_of
from compress.methods.objectives import Projections
from compress.models.initialise import student_of
from compress.models.shapes import Shape
from compress.training.loop import StageSettings
from compress.training.stage import train_stage

VOCABULARY = 4_000
WIDTH, HEADS, LAYERS, TOKENS = 64, 4, 4, 64


def make_tokenizer(texts: list[str], file: Path) -> None:
    """Trains a WordPiece tokenizer on `texts`: once for all trainings, since it breaks ties at random."""
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 - no password
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(file))


def train(given: argparse.Namespace, folder: Path, tokenizer_file: Path, accumulate: int = 1) -> list[float]:
    """The loss of each step."""
    from transformers import BertConfig, BertForMaskedLM

    texts = read_texts(Path(given.corpus))[: given.texts]
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    teacher = BertForMaskedLM(config).eval()
    with torch.no_grad():  # with small random weights, attention would be nearly uniform
        for parameter in teacher.parameters():
            parameter.mul_(4.0 if parameter.ndim == 2 else 1.0)
    kind = getattr(torch, given.dtype)
    student, _ = student_of(teacher, Shape(2, WIDTH, HEADS, 2 * WIDTH), seed=0, new_layers=True)
    stage = stages_of(given.method, Sizes(LAYERS, 2, WIDTH, WIDTH))[0]
    masking = masking_of(tokenizer, config.vocab_size) if stage.objective.masks_tokens else None
    text = CorpusText(chunks(texts, tokenizer, TOKENS), 0, given.batch, 0, masking)
    maps = Projections(stage.objective, config, student.config).to(kind)
    settings = StageSettings(given.steps, accumulate=accumulate)
    progress = train_stage(stage, teacher.to(kind), student.to(kind), text, settings, folder=folder, projections=maps)
    return [value for _, value in progress.loss]


def difference(a: list[float], b: list[float]) -> dict[str, float]:
    """The largest difference of two curves, absolute and relative to the loss."""
    apart = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return {"largest": max(apart), "largest_relative": max(d / x for d, x in zip(apart, a, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    for name, default in (("steps", 40), ("batch", 16), ("processes", 2), ("texts", 500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--method", default="minilmv2")
    parser.add_argument("--dtype", default="float32", help="float64 shows whether a difference is only rounding")
    parser.add_argument(
        "--shared", help=argparse.SUPPRESS
    )  # folder with the tokenizer, where the processes write their curve
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        if given.shared:
            curve = train(given, work, Path(given.shared, "tokenizer.json"))
            if distributed.main():
                Path(given.shared, "curve.json").write_text(json.dumps(curve))
            return
        made = work / "tokenizer.json"
        make_tokenizer(read_texts(Path(given.corpus))[: given.texts], made)
        whole = train(given, work / "whole", made)
        parts = train(given, work / "parts", made, given.processes)
        started = time.perf_counter()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.processes), __file__]
        command = [sys.executable, *launch, *sys.argv[1:], "--shared", scratch]
        root = str(Path(__file__).parents[2])
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": root})
        several = json.loads((work / "curve.json").read_text())
        document = {
            "method": given.method,
            "steps": given.steps,
            "batch": given.batch,
            "processes": given.processes,
            "dtype": given.dtype,
            "loss": {"first": whole[0], "last": whole[-1]},
            "processes less one": difference(whole, several),
            "parts less whole": difference(whole, parts),
            "processes less parts": difference(parts, several),
            "seconds": round(time.perf_counter() - started, 1),
            "machine": {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__},
            "curves": {"one": whole, "parts": parts, "processes": several},
        }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
