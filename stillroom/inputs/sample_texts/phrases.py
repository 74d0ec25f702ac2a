"""The grammar of the demo's messages, from `phrases.toml`, which explains it."""

import tomllib
from importlib.resources import files
from typing import NamedTuple


class Phrases(NamedTuple):
    """`everywhere` is for all splits, `dealt` for unlabelled text; of `dealt` position 1 modulo 3 for validation, 2 for test."""

    everywhere: tuple[str, ...]
    dealt: tuple[str, ...]


_TABLES = tomllib.loads(files(__package__).joinpath("phrases.toml").read_text(encoding="utf-8"))


def _phrases(table: dict[str, list[str]]) -> Phrases:
    return Phrases(tuple(table["everywhere"]), tuple(table["dealt"]))


INTENTS: dict[str, Phrases] = {name: _phrases(table) for name, table in _TABLES["intents"].items()}
DETAILS = _phrases(_TABLES["details"])
GREETINGS: list[str] = _TABLES["greetings"]
CLOSINGS: list[str] = _TABLES["closings"]
EMOJI: list[str] = _TABLES["emoji"]
