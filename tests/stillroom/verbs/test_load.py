"""`stillroom load` through the command line's own door, on servers over loopback."""

import asyncio
import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from in_process import command
from loopback import Asked, answer, serving

import stillroom
from serve.errors import BadInput


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text('a lamp\nthe "best" 😀\nOslo\n', encoding="utf-8")
    return file


async def at_once(asked: Asked) -> bytes:
    return answer()


def test_one_rate_is_tried_with_the_texts_of_the_file(texts: Path) -> None:
    with serving(at_once) as server:
        code, printed, said = command("load", server.url, "--data", texts, "--rate", 200, "--queries", 30, "--json")
        bodies = [json.loads(asked.body) for asked in server.asked]

    assert code == 0, said
    document = json.loads(printed)
    (trial,) = document["trials"]
    assert (trial["rate_per_s"], trial["queries"], trial["ok"], trial["errors"]) == (200.0, 30, 30, {})
    assert len(trial["latencies_ms"]) == len(trial["late_ms"]) == 30
    assert trial["p50_ms"] <= trial["p90_ms"] <= trial["p99_ms"]
    assert document["machine"]["cores"] >= 1
    assert document["conditions"] == {
        "texts": 3, "template": '{"text": "TEXT"}', "connections": 256, "timeout_s": 10.0, "seed": 0,
    }  # fmt: skip
    assert len(bodies) == 31  # the first is the probe
    assert {body["text"] for body in bodies} == {"a lamp", 'the "best" 😀', "Oslo"}


def test_without_a_rate_the_highest_is_searched_for_and_written(texts: Path, tmp_path: Path) -> None:
    async def handler(asked: Asked) -> bytes:
        return answer(200 if asked.number < 60 else 503)

    out = tmp_path / "out"
    with serving(handler) as server:
        code, printed, said = command(
            "load", server.url, "--data", texts, "--bound-ms", 2000, "--queries", 20, "--out", out
        )
    assert code == 0, said
    assert "stayed under 2000 ms, with every query answered, is " in printed
    assert sorted(path.name for path in out.iterdir()) == ["load.json", "table.md"]
    document = json.loads((out / "load.json").read_text())
    assert document["bound_ms"] == 2000
    assert document["rate_per_s"] == max(trial["rate_per_s"] for trial in document["trials"] if trial["held"])
    table = (out / "table.md").read_text()
    assert "| rate/s | p50 ms | p90 ms | p99 ms | ok | refused |" in table
    assert table.count("| no |") == sum(not trial["held"] for trial in document["trials"]) > 0


def test_templates_and_headers_reach_another_server(texts: Path) -> None:
    with serving(at_once) as server:
        code, printed, said = command(
            "load", server.url, "--data", texts, "--rate", 500, "--queries", 3, "--template", '{"inputs": ["TEXT"], "raw": true}',
            "--header", "Authorization: Bearer a:b", "--header", "X-Other:  c",
        )  # fmt: skip
        asked = server.asked[-1]
    assert code == 0, said
    assert json.loads(asked.body)["raw"] is True
    assert "Authorization: Bearer a:b\r\nX-Other: c\r\n" in asked.head
    assert "p99 rests on 3 of the 100 answers" in printed


def test_errors_and_refusals_stand_in_the_table(texts: Path) -> None:
    async def handler(asked: Asked) -> bytes | None:
        return [answer(), answer(429), answer(500), b"garbage\r\n\r\n"][asked.number % 4]

    with serving(handler) as server:
        code, printed, said = command(
            "load", server.url, "--data", texts, "--rate", 500, "--queries", 7, "--connections", 1
        )
    assert code == 0, said
    assert "4 (500: 2, not HTTP: 2)" in printed.replace("│ ", "")


def test_a_server_that_does_not_take_the_request_gets_no_load(texts: Path) -> None:
    async def handler(asked: Asked) -> bytes:
        return answer(422, b'{"error": {"message": "text: missing"}}')

    with serving(handler) as server:
        code, _, said = command("load", server.url, "--data", texts, "--rate", 50)
        assert len(server.asked) == 1
    assert code == 2
    assert "with 422 Said; no load was sent" in said
    assert "text: missing" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 5.0, "bound_ms": 5.0}, "--bound-ms and --rate are both given"),
        ({"queries": 5, "seconds": 5.0}, "--seconds and --queries are both given"),
        ({"rate": 0.0}, "--rate is 0"),
        ({"rate": -3.0}, "--rate is -3"),
        ({"rate": float("nan")}, "--rate is nan"),
        ({"rate": float("inf")}, "--rate is inf"),
        ({"rate": 1e12}, "10,000,000,000,000 queries; at most 1,000,000"),
        ({"connections": 0}, "--connections is 0"),
        ({"connections": 10**9}, "--connections is 1,000,000,000"),
        ({"timeout": 0.0}, "--timeout is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"headers": ("Accept",)}, "'Accept' has no colon"),
        ({"headers": ("A b: c",)}, "'A b'"),
        ({"headers": ("Connection: close",)}, "the header 'Connection' cannot be sent"),
        ({"template": "TEXT"}, "is not JSON"),
        ({"template": '{"text": "text"}'}, 'has no string "TEXT"'),
        ({"rates": 5}, "rates is not a setting"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_cannot_be_used_are_refused_before_a_request_is_sent(
    given: dict[str, Any], message: str, texts: Path
) -> None:
    with serving(at_once) as server:
        with pytest.raises(BadInput, match=message):
            stillroom.load(server.url, texts, **given)
        assert server.asked == []


def test_all_that_is_wrong_with_a_load_is_one_message(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        stillroom.load("ftp://somewhere", empty, rate=-1.0, timeout=0.0, connections=0, seed=-1)
    for part in ("--rate is -1", "--timeout is 0", "--connections is 0", "--seed is -1"):
        assert part in refused.value.message
    with pytest.raises(BadInput) as refused:
        stillroom.load("ftp://somewhere", empty, template='{"text": "text"}', headers=("Accept", "A b: c"))
    for part in ("'Accept' has no colon", "'A b'", "ftp://somewhere", "empty.txt", 'has no string "TEXT"'):
        assert part in refused.value.message


def test_the_machine_is_looked_at_before_the_first_request(texts: Path) -> None:
    asked_s: list[float] = []

    async def slow_once(asked: Asked) -> bytes:
        if not asked_s:
            asked_s.append(time.time())
            await asyncio.sleep(1.1)  # the moment is kept in whole seconds
        return answer()

    with serving(slow_once) as server:
        document = stillroom.load(server.url, texts, rate=50.0, queries=1)
    assert datetime.fromisoformat(document["machine"]["measured_at"]).timestamp() <= asked_s[0]


def test_folders_that_cannot_be_used_are_told_before_any_load(texts: Path, tmp_path: Path) -> None:
    given = ("--data", texts, "--rate", 500, "--queries", 1, "--out")
    with serving(at_once) as server:
        for out, said in (
            (tmp_path, "already exists and holds other files"),
            (texts / "out", "texts.txt is not a folder"),
        ):
            ended = command("load", server.url, *given, out)
            assert ended.code == 2
            assert said in ended.said
        assert server.asked == []
        # What a kill left of a file under way is no other thing.
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / ".load.json.4711.partial").write_text("{", encoding="utf-8")
        assert command("load", server.url, *given, tmp_path / "out").code == 0
    assert (tmp_path / "out" / "load.json").is_file()


def test_load_needs_no_torch(texts: Path) -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; sys.argv = ['stillroom', *sys.argv[1:]]\n"
    code += "from stillroom.cli.main import app, guarded; sys.exit(guarded(app))"
    with serving(at_once) as server:
        given = ["load", server.url, "--data", str(texts), "--rate", "200", "--queries", "5"]
        done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "answers with 2xx a second, at 200.0 queries a second" in done.stdout
