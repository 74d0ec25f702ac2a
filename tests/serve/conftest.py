"""Bundles to serve, each made once; see `lookup_bundles` for what their models answer."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lookup_bundles import (
    INTENTS,
    VOCABULARY,
    city_table,
    intent_table,
    number_table,
    write_answers_bundle,
    write_bundle,
    write_graph,
    write_manifest,
    write_relations_bundle,
    write_tokenizer,
    write_vectors_bundle,
)


@pytest.fixture(scope="session")
def entities_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "cities"
    folder.mkdir()
    write_tokenizer(folder)
    write_graph(folder / "onnx" / "model.onnx", city_table(), per_text=False)
    write_manifest(folder)
    return folder


@pytest.fixture(scope="session")
def intents_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "intents"
    folder.mkdir()
    write_tokenizer(folder)
    write_graph(folder / "onnx" / "model.onnx", intent_table(), per_text=True)
    write_manifest(folder, task="text-classification", labels=INTENTS)
    return folder


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
def manifest_writer() -> Callable[..., None]:
    """`write_manifest`, for tests that change what a manifest says."""
    return write_manifest


@pytest.fixture(scope="session")
def broken_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `entities_bundle`, but the model says NaN at the word `refund`."""
    folder = tmp_path_factory.mktemp("bundles") / "broken"
    folder.mkdir()
    write_tokenizer(folder)
    table = city_table()
    table[VOCABULARY.index("refund")] = np.nan
    write_graph(folder / "onnx" / "model.onnx", table, per_text=False)
    write_manifest(folder)
    return folder
