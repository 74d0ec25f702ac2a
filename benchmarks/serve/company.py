"""Check that the bytes of an answer do not depend on other requests in the server, the queue and the batch.

    python benchmarks/serve/company.py BUNDLE TEXTS [TEXTS ...] [--count 10000] [--times 3] [--connections 16] [--variant V] [--json F]

Each text is first sent alone: one connection, one text a request, no other request. Then all texts are sent `--times` times, in random
order, in requests of 1 to 32 texts, by many connections at once. An answer (the bytes of an element of `results`) counts if it differs
from the text's answer alone. The exit code is 1 if one differs or is lost.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from running import Server, drive, endpoint, post, serving, text_body

from compress.data.texts import read_texts
from latency.measure.machine import machine_facts

MOST_TEXTS = 32  # a request
SHOWN = 3  # differences
TOO_MANY = 429
PAUSE_S = 1.0  # before refused requests are sent again


class Answers(msgspec.Struct):
    results: list[msgspec.Raw]


def answers(status: int, body: bytes, texts: int) -> list[bytes]:
    """The bytes of each text's answer; empty without an answer."""
    if status != 200:
        return [b""] * texts
    return [bytes(each) for each in msgspec.json.decode(body, type=Answers).results]


def drawn_groups(count: int, seed: int) -> list[list[int]]:
    """All places in random order, in groups of 1 to MOST_TEXTS, small and large ones equally often."""
    chance = random.Random(seed)
    order = chance.sample(range(count), count)
    groups = []
    while order:
        groups.append([order.pop() for _ in range(min(len(order), chance.choice((1, 2, 4, 8, 16, MOST_TEXTS))))])
    return groups


def in_groups(
    server: Server, path: str, texts: list[str], groups: list[list[int]], connections: int
) -> Iterator[tuple[list[int], list[bytes]]]:
    """Each group with the answers to its texts. Requests refused with 429 are sent again."""
    while groups:
        requests = [
            post(
                server.place, path, text_body([texts[place] for place in group] if len(group) > 1 else texts[group[0]])
            )
            for group in groups
        ]
        driven = drive(server.place, requests, connections=connections)
        refused = []
        for group, status, body in zip(groups, driven.became, driven.bodies, strict=True):
            if status == TOO_MANY:
                refused.append(group)
            else:
                yield group, answers(status, body, len(group))
        groups = refused
        time.sleep(PAUSE_S if refused else 0)


def distinct_texts(files: list[Path], count: int) -> list[str]:
    """The first `count` texts of `files`, taken in turns, each once."""
    found: dict[str, None] = {}
    columns = [read_texts(file) for file in files]
    for row in range(max(map(len, columns))):
        found.update((column[row], None) for column in columns if row < len(column))
    return list(found)[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--variant", help="the bundle's default by default")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts, path = distinct_texts(given.texts, given.count), endpoint(given.bundle)
    differing: list[dict[str, Any]] = []
    in_company = lost = 0
    began_s = time.perf_counter()
    with serving([given.bundle], *(["--variant", given.variant] if given.variant else [])) as server:
        driven = drive(server.place, [post(server.place, path, text_body(text)) for text in texts], connections=1)
        alone = [answers(status, body, 1)[0] for status, body in zip(driven.became, driven.bodies, strict=True)]
        lost += alone.count(b"")
        for turn in range(given.times):
            for group, found in in_groups(server, path, texts, drawn_groups(len(texts), turn), given.connections):
                for place, answer in zip(group, found, strict=True):
                    in_company += 1
                    lost += not answer
                    if answer and answer != alone[place]:
                        differing.append({
                            "text": texts[place], "alone": alone[place].decode(), "in_company": answer.decode(), "texts": len(group),
                        })  # fmt: skip
    seconds = time.perf_counter() - began_s
    print(
        f"{len(texts):,} texts, {in_company:,} answers in batches: {len(differing):,} differ in any byte, {lost} were lost "
        f"({seconds:.0f} s)"
    )
    for each in differing[:SHOWN]:
        print(json.dumps(each, ensure_ascii=False, indent=1))
    if given.json:
        given.json.write_text(
            json.dumps({
                "machine": machine_facts(), "texts": len(texts), "in_company": in_company, "lost": lost,
                "differing": len(differing), "examples": differing[:100], "connections": given.connections,
            }, indent=1)
        )  # fmt: skip
    return int(bool(differing or lost))


if __name__ == "__main__":
    raise SystemExit(main())
