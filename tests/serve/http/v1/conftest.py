"""The client of a module's server."""

from collections.abc import Iterator

import httpx
import pytest
from patience import PATIENCE_S


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield client
