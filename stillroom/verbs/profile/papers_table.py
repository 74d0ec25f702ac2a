"""The papers' table of sizes and speeds, measured on this machine with random weights: speed does not depend on weights."""

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from compress.data.sampler import subset
from compress.models.configurations import LONGEST_TEXT
from compress.models.shapes import STUDENTS, Shape
from compress.settings import RowColumns
from latency.candidates.candidate import Runtime
from latency.measure.machine import machine_facts
from latency.measure.statistics import process_ratio
from latency.profile import time_grid
from serve.bundle.runtimes import Device, has_openvino
from serve.errors import BadInput
from serve.text.tokenizer import load_tokenizer
from stillroom.console import bar, say
from stillroom.inputs.folders import check_out_folder
from stillroom.verbs.profile import Profiling
from stillroom.verbs.profile.run import (
    FILES,
    found_here,
    grid_plan,
    keep,
    known_parts,
    refuse_nothing,
    ways_of,
    with_lengths,
)
from stillroom.verbs.profile.speed_regression import turns_of
from stillroom.verbs.profile.texts import CALIBRATION_TEXTS


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


# Settings without effect on the papers' table, which has medians of single rows of random tokens.
NOT_OF_THE_PAPER = (
    "data", "batches", "budget_ms", "percentile", "bound_ms", "price_per_core_hour", "sweep", *(field.name for field in fields(RowColumns)),
)  # fmt: skip


def profile_paper(settings: Profiling, command: str = "") -> dict[str, Any]:
    """Times the papers' teacher and students, with random weights, on rows of tokens; `paper` has published and measured times.

    `out` and `command` are used as by `profile_models`. Raises BadInput: a setting is given that has no effect on the table, or
    no requested runtime works on this machine.
    """
    machine = machine_facts()
    if settings.out:
        check_out_folder(settings.out, FILES)
    settings = for_the_paper(settings)
    with tempfile.TemporaryDirectory(prefix="stillroom-") as folder:
        say("paper: making 12x768, 6x768, 6x384, 4x576 and 3x384 with random weights")
        models = make_models(Path(folder) / "models")
        texts = random_texts(settings.seed)
        found = found_here(models, settings, Path(folder), subset(texts, CALIBRATION_TEXTS, settings.seed))
        refuse_nothing(found, settings)
        for line in found.left_out:
            say(f"left out: {line}")
        candidates = [replace(candidate, reads=None) for candidate in found.candidates]
        settings = with_lengths(settings, candidates)
        known = known_parts(machine, found.left_out, command, settings)

        def tell(so_far: dict[str, Any], *, ended: bool = False) -> dict[str, Any]:
            document = {**so_far, **known, "paper": paper_rows(so_far)}
            return keep(document, settings, ended=ended)

        tokenizer = load_tokenizer(models[0], LONGEST_TEXT)
        with bar("timing") as shown:
            document = time_grid(
                candidates, texts, tokenizer, grid_plan(settings), seed=settings.seed, progress=shown, machine=machine, keep=tell,
            )  # fmt: skip
    return tell(document, ended=True)


def for_the_paper(settings: Profiling) -> Profiling:
    """`settings` for the papers' table. BadInput names every setting that has no effect on it."""
    usual = Profiling()
    refused = [
        "--" + name.replace("_", "-")
        for name in NOT_OF_THE_PAPER
        if getattr(settings, name) != getattr(usual, name) and (name, getattr(settings, name)) != ("batches", (1,))
    ]
    if refused:
        raise BadInput(
            f"{', '.join(refused)}: no effect with --paper, which times random weights on single rows of tokens. Leave "
            f"{'it' if len(refused) == 1 else 'them'} out, or profile a model of your own."
        )
    devices = ways_of(settings).devices
    return replace(settings, device=devices, batches=(1,), runtimes=settings.runtimes or runtimes(devices))


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


def paper_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Published and measured times: a row per model, device and length, with the fastest candidate of each kind.

    Speed-ups are the teacher's median in torch fp32 on the same device over the model's, with their interval: `[ratio, low, high]`.
    They are empty where that was not timed.
    """
    rows = []
    shapes = list(dict.fromkeys((row["device"], row["tokens"]) for row in document["candidates"]))
    for device, tokens in shapes:
        timed = [row for row in document["candidates"] if (row["device"], row["tokens"]) == (device, tokens)]
        kinds = list(dict.fromkeys(_model_and_kind(row)[1] for row in timed))
        teacher = next((row for row in timed if _model_and_kind(row) == (TEACHER, "torch fp32")), None)
        for name in SHAPES:
            published = PUBLISHED[name]
            theirs_ms = published.cpu_ms if device == "cpu" else published.gpu_ms
            teacher_ms = PUBLISHED[TEACHER].cpu_ms if device == "cpu" else PUBLISHED[TEACHER].gpu_ms
            row = {
                "model": name,
                "device": device,
                "tokens": tokens,
                "theirs_ms": theirs_ms,
                "theirs_speedup": round(teacher_ms / theirs_ms, 1),
                "ours": {},
            }
            for kind in kinds:
                own = [each for each in timed if _model_and_kind(each) == (name, kind)]
                if not own:
                    continue
                best = min(own, key=lambda each: each["p50_ms"])
                ratio = process_ratio(turns_of(teacher), turns_of(best)) if teacher else ()
                row["ours"][kind] = {
                    "name": best["name"],
                    "p50_ms": best["p50_ms"],
                    "speedup": [round(each, 4) for each in ratio],
                }
            rows.append(row)
    return rows


def _model_and_kind(row: dict[str, Any]) -> tuple[str, str]:
    """The model and the column of the table; int8 is one column for all runtimes."""
    kind = "int8" if row["precision"] == "int8" else f"{row['runtime']} {row['precision']}"
    return row["name"].split()[0], kind


def paper_markdown(rows: Sequence[dict[str, Any]]) -> str:
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
