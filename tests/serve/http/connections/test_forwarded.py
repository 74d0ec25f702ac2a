"""Whose word is taken for a client's address: that of a trusted proxy alone."""

from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from server_process import serving

FORWARDED = {"X-Forwarded-For": "203.0.113.7, 127.0.0.1", "X-Forwarded-Proto": "https"}


@pytest.mark.parametrize(
    ("trusted", "client", "scheme"),
    [({}, "203.0.113.7", "https"), ({"FORWARDED_ALLOW_IPS": "10.0.0.0/8"}, "127.0.0.1", "http")],
    ids=["by-default-this-machine", "another-network"],
)
def test_the_address_of_a_client_is_believed_from_trusted_proxies_alone(
    entities_bundle: Path, trusted: dict[str, str], client: str, scheme: str
) -> None:
    with serving(entities_bundle, "--log-format", "json", environment=trusted) as server:
        page = httpx.get(f"{server.url}/docs", headers=FORWARDED, timeout=PATIENCE_S).text
        assert f"curl -s {scheme}://127.0.0.1:" in page
        assert server.logged(lambda entry: entry["path"] == "/docs")["client"] == client
