"""The server under `stillroom load`, both in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
from patience import PATIENCE_S
from server_process import ROOT, running, wait_until_ready


def test_load_is_answered_and_counted(entities_bundle: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("Fly to 😀 Rome\nrefund\n", encoding="utf-8")
    with running(entities_bundle) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        wait_until_ready(client)
        command = [sys.executable, "-m", "stillroom", "load", f"{url}/v1/entities", "--data", texts, "--json"]
        done = subprocess.run(
            [*map(str, command), "--rate", "100", "--queries", "50"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        counted = client.get("/metrics").text
    (trial,) = json.loads(done.stdout)["trials"]
    assert (trial["ok"], trial["refused"], trial["errors"], trial["timeouts"]) == (50, 0, {}, 0)
    assert 'stillroom_requests_total{endpoint="/v1/entities",status="200"} 51.0' in counted  # a probe came first
