"""Bundles to serve, each made once; see `lookup_bundles` for what their models answer."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from lookup_bundles import (
    INTENTS,
    TAGS,
    VOCABULARY,
    city_table,
    intent_table,
    number_table,
    write_answers_bundle,
    write_bundle,
    write_relations_bundle,
    write_vectors_bundle,
)
from patience import PATIENCE_S
from server_process import Server, serving


@pytest.fixture(scope="session")
def entities_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "cities", city_table())


@pytest.fixture(scope="session")
def intents_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "intents"
    return write_bundle(folder, intent_table(), task="text-classification", labels=INTENTS)


@pytest.fixture(scope="session")
def relations_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_relations_bundle(tmp_path_factory.mktemp("bundles") / "relations")


@pytest.fixture(scope="session")
def numbers_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "stars"
    return write_bundle(folder, number_table(), task="text-regression", labels=["score"])


@pytest.fixture(scope="session")
def answers_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers_bundle(tmp_path_factory.mktemp("bundles") / "places")


@pytest.fixture(scope="session")
def bundle_of_each_kind(
    entities_bundle: Path,
    intents_bundle: Path,
    relations_bundle: Path,
    numbers_bundle: Path,
    answers_bundle: Path,
    vectors_bundle: Path,
) -> list[Path]:
    return [entities_bundle, intents_bundle, relations_bundle, numbers_bundle, answers_bundle, vectors_bundle]


@pytest.fixture(scope="session")
def vectors_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vectors_bundle(tmp_path_factory.mktemp("bundles") / "vectors")


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a bundle to where a test may break it."""

    def copy(bundle: Path) -> Path:
        return Path(shutil.copytree(bundle, tmp_path / bundle.name))

    return copy


@pytest.fixture
def bundle_copy(entities_bundle: Path, copied: Callable[[Path], Path]) -> Path:
    """A copy of `entities_bundle`, which the test may change."""
    return copied(entities_bundle)


@pytest.fixture(scope="session")
def broken_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `entities_bundle`, but the model says NaN at the word `refund`."""
    table = city_table()
    table[VOCABULARY.index("refund")] = np.nan
    return write_bundle(tmp_path_factory.mktemp("bundles") / "broken", table)


@pytest.fixture(scope="session")
def promising_bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """`sure` answers as `intents`, and `strangers` as `cities`, but takes every unknown word for a city. Both make promises."""
    folder = tmp_path_factory.mktemp("bundles")
    variant = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime"}
    of_sure = {"fp32": variant | {"promises": {"precision=0.9": 0.6, "recall=0.5": 0.0}}}
    of_strangers = {"fp32": variant | {"promises": {"precision=0.99": 0.95, "recall=0.9": 0.5}}}
    table = city_table()
    table[VOCABULARY.index("[UNK]")] = [0.0, 4.0, 1.0]
    return [
        write_bundle(folder / "sure", intent_table(), task="text-classification", labels=INTENTS, variants=of_sure),
        write_bundle(folder / "strangers", table, labels=TAGS, variants=of_strangers),
    ]


@pytest.fixture(scope="session")
def plain_server(entities_bundle: Path) -> Iterator[Server]:
    """A server of `cities` as it is without options. A test may hold its worker process up, and lets it go on."""
    with serving(entities_bundle) as running:
        yield running


@pytest.fixture
def server(plain_server: Server) -> Server:
    return plain_server


@pytest.fixture(scope="session")
def url(bundle_of_each_kind: list[Path], broken_bundle: Path, promising_bundles: list[Path]) -> Iterator[str]:
    """A server of one model of each kind, and of `broken`, `sure` and `strangers`, which are asked by their names."""
    with serving(*bundle_of_each_kind, broken_bundle, *promising_bundles) as running:
        yield running.url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield client
