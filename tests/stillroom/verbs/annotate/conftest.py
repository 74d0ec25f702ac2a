"""Bundles to annotate with, each made once."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from forking import FORKING
from lookup_bundles import VOCABULARY, city_table, write_bundle, write_relations_bundle

from stillroom import child_process


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Pools of this process fork what computes for them; those of commands start it as a user's do."""
    with patch.object(child_process, "SPAWN", FORKING):
        yield


@pytest.fixture(scope="package")
def cities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finds cities; its model says NaN at the word `it`."""
    table = city_table()
    table[VOCABULARY.index("it")] = np.nan
    return write_bundle(tmp_path_factory.mktemp("bundles") / "cities", table)


@pytest.fixture(scope="package")
def relations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_relations_bundle(tmp_path_factory.mktemp("bundles") / "relations")


@pytest.fixture(scope="package")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finds cities, and takes some milliseconds for a row."""
    return write_bundle(tmp_path_factory.mktemp("bundles") / "slow", city_table(), layers=24)
