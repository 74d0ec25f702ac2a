"""How customers put things: the grammar of the demo's messages, which `phrases.toml` holds and explains."""

import tomllib
from importlib.resources import files
from typing import NamedTuple


class Phrases(NamedTuple):
    """`everywhere` is said in all splits, `dealt` in unlabelled text; of it position 1 modulo 3 in validation, 2 in test."""

    everywhere: tuple[str, ...]
    dealt: tuple[str, ...]


_TOLD = tomllib.loads(files(__package__).joinpath("phrases.toml").read_text(encoding="utf-8"))


def _phrases(table: dict[str, list[str]]) -> Phrases:
    return Phrases(tuple(table["everywhere"]), tuple(table["dealt"]))


INTENTS: dict[str, Phrases] = {name: _phrases(table) for name, table in _TOLD["intents"].items()}
DETAILS = _phrases(_TOLD["details"])
GREETINGS: list[str] = _TOLD["greetings"]
CLOSINGS: list[str] = _TOLD["closings"]
EMOJI: list[str] = _TOLD["emoji"]
