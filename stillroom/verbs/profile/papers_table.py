"""The papers' table of sizes and speeds, measured on this machine with random weights: speed does not depend on weights."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from compress.models.shapes import STUDENTS, Shape
from latency.candidates.candidate import Runtime
from latency.measure.result_document import CandidateRow, PaperRow, ProfileDocument
from latency.measure.statistics import process_ratio
from serve.bundle.runtimes import Device, has_openvino
from stillroom.verbs.profile.speed_regression import turns_of


class Published(NamedTuple):
    """Comparative Analysis of Task-Agnostic Distillation (2023), table 1, the monolingual columns; batch 1."""

    cpu_ms: float
    gpu_ms: float


TEACHER = "12x768"
SHAPES: dict[str, Shape] = {TEACHER: Shape(12, 768, 12, 3072)} | {
    name: STUDENTS[name] for name in ("6x768", "6x384", "4x576", "3x384")
}
PUBLISHED = {
    TEACHER: Published(64.91, 8.69),
    "6x768": Published(33.28, 5.98),
    "6x384": Published(11.98, 5.69),
    "4x576": Published(9.53, 3.66),
    "3x384": Published(5.41, 3.02),
}
VOCABULARY = 30_522  # BERT's
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
TEXTS, WORDS_EACH = 200, 24
CPU_RUNTIMES: tuple[Runtime, ...] = ("torch", "onnxruntime")
GPU_RUNTIMES: tuple[Runtime, ...] = ("torch", "torch-compile", "torch-cuda-graphs")


def runtimes(devices: Sequence[Device]) -> tuple[Runtime, ...]:
    """The runtimes of the table."""
    openvino: tuple[Runtime, ...] = ("openvino",) if has_openvino() else ()
    on_cpu = (*CPU_RUNTIMES, *openvino) if "cpu" in devices else ()
    on_gpu = GPU_RUNTIMES if "cuda" in devices else ()
    return tuple(dict.fromkeys([*on_cpu, *on_gpu]))


def make_models(folder: Path) -> list[Path]:
    """Writes the teacher and the students as checkpoints in `folder`: each a BERT with two classes and a word tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertForSequenceClassification

    from compress.models.configurations import quiet

    words = [*SPECIAL, *(f"w{i}" for i in range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    made = []
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.ffn,
            num_labels=2,
        )
        place = folder / name
        with quiet():
            BertForSequenceClassification(config).save_pretrained(place)
        tokenizer.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        made.append(place)
    return made


def random_texts(seed: int) -> list[str]:
    """Texts of words in the vocabulary of `make_models`."""
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(VOCABULARY - len(SPECIAL))}" for _ in range(WORDS_EACH)) for _ in range(TEXTS)]


def paper_rows(document: ProfileDocument) -> list[PaperRow]:
    """Published and measured times: a row per model, device and length, with the fastest candidate of each kind.

    Speed-ups are relative to the teacher in torch fp32 on the same device, and absent where that was not timed.
    """
    rows = []
    shapes = list(dict.fromkeys((row["device"], row["tokens"]) for row in document["candidates"]))
    for device, tokens in shapes:
        timed = [row for row in document["candidates"] if (row["device"], row["tokens"]) == (device, tokens)]
        kinds = list(dict.fromkeys(_kind(row["runtime"], row["precision"]) for row in timed))
        teacher = next((row for row in timed if _is_teacher(row)), None)
        for name in SHAPES:
            published = PUBLISHED[name]
            theirs_ms = published.cpu_ms if device == "cpu" else published.gpu_ms
            teacher_ms = PUBLISHED[TEACHER].cpu_ms if device == "cpu" else PUBLISHED[TEACHER].gpu_ms
            row = PaperRow(
                model=name,
                device=device,
                tokens=tokens,
                theirs_ms=theirs_ms,
                theirs_speedup=round(teacher_ms / theirs_ms, 1),
                ours={},
            )
            for kind in kinds:
                own = [
                    each
                    for each in timed
                    if each["name"].split()[0] == name and _kind(each["runtime"], each["precision"]) == kind
                ]
                if own:
                    best = min(own, key=lambda each: each["p50_ms"])
                    row["ours"][kind] = {
                        "name": best["name"],
                        "p50_ms": best["p50_ms"],
                        "speedup": _speedup(teacher, best) if teacher else [],
                    }
            rows.append(row)
    return rows


def _kind(runtime: str, precision: str) -> str:
    """The column of the table; int8 is one column for all runtimes."""
    return "int8" if precision == "int8" else f"{runtime} {precision}"


def _is_teacher(row: CandidateRow) -> bool:
    return row["name"].split()[0] == TEACHER and (row["runtime"], row["precision"]) == ("torch", "fp32")


def _speedup(teacher: CandidateRow, row: CandidateRow) -> list[float]:
    """The teacher's median over that of `row`, with its interval: [ratio, low, high]."""
    return [round(x, 4) for x in process_ratio(turns_of(teacher), turns_of(row))]


def paper_markdown(rows: Sequence[PaperRow]) -> str:
    """The table in Markdown, one for each device and length."""
    parts = []
    for device, tokens in dict.fromkeys((row["device"], row["tokens"]) for row in rows):
        chosen = [row for row in rows if (row["device"], row["tokens"]) == (device, tokens)]
        kinds = list(dict.fromkeys(kind for row in chosen for kind in row["ours"]))
        header = ["", "paper, ms", "speed-up", *(cell for kind in kinds for cell in (f"{kind}, ms", "speed-up"))]
        lines = [header, ["---", *["---:"] * (len(header) - 1)]]
        for row in chosen:
            cells = [row["model"], f"{row['theirs_ms']:.2f}", f"{row['theirs_speedup']:.1f}"]
            for kind in kinds:
                ours = row["ours"].get(kind)
                cells += [f"{ours['p50_ms']:.2f}", _spelled(ours["speedup"])] if ours else ["", ""]
            lines.append(cells)
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        parts.append(f"Batch 1, {tokens} tokens, {device}; speed-ups over 12x768 in torch fp32\n\n{table}")
    return "\n".join(parts)


def _spelled(speedup: Sequence[float]) -> str:
    return "{:.1f} [{:.1f}, {:.1f}]".format(*speedup) if speedup else ""
