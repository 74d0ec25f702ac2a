"""What the tests of `deploy/` read: its files, and a bundle for a server to serve."""

from pathlib import Path

import pytest
from lookup_bundles import city_table, write_bundle


@pytest.fixture(scope="session")
def served_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "cities", city_table())
