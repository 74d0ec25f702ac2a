"""Small exported models, made once for all tests of this folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_checkpoints import MAX_LENGTH, WORDS, Exported, write_checkpoint

from export.graph import exporter
from export.precision.int8 import quantise_static
from export.precision.int8_preparation import Prepared


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """40 different texts of 3 to 20 words, some of them out of the vocabulary."""
    odd = ["café", "r2d2", "😀", "zürich"]
    return [" ".join((WORDS * 2)[start : start + 3 + start % 18]) + f" {odd[start % 4]}" for start in range(20)] + [
        " ".join(reversed((WORDS * 2)[start : start + 3 + start % 7])) for start in range(20)
    ]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Exported]:
    """`exported(family, head)`: a checkpoint and its graph, made at the first call."""
    made: dict[tuple[str, str], Exported] = {}

    def export_once(family: str = "bert", head: str = "TokenClassification") -> Exported:
        if (family, head) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{head}")
            checkpoint = write_checkpoint(folder / "checkpoint", family, head)
            onnx_file = folder / "model.onnx"
            made[family, head] = Exported(
                checkpoint, onnx_file, exporter.export_graph(checkpoint, onnx_file, MAX_LENGTH)
            )
        return made[family, head]

    return export_once


@pytest.fixture(scope="session")
def bert(exported: Callable[..., Exported]) -> Exported:
    return exported()


@pytest.fixture(scope="session")
def bert_prepared(bert: Exported, texts: list[str]) -> Prepared:
    """The small BERT with its outliers in its weights, and ranges over the first 20 texts."""
    return Prepared.of(bert.onnx_file, bert.encodings(texts[:20]), threads=1)


@pytest.fixture(scope="session")
def bert_int8(bert_prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int8") / "model_quantized.onnx"
    quantise_static(bert_prepared.model, out, bert_prepared.ranges)
    return out
