"""The bundle's tokenizer, without padding and cut at the model's length."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from serve.errors import BundleError, is_panic


def load_tokenizer(folder: Path, max_length: int) -> Tokenizer:
    """The tokenizer in `folder/tokenizer.json`.

    Padding is switched off (the session pads to the longest text of a batch), and truncation is set to `max_length` tokens,
    special tokens included. `encoding.overflowing` holds what was cut off. BundleError when the file cannot be read, or when
    `max_length` leaves no room beside the special tokens. Special tokens for which the model's embedding, by `folder/config.json`, has
    no row are left out: a text that spells one is read as plain characters.
    """
    tokenizer = without_rowless_tokens(read_tokenizer(folder), _embedding_rows(folder))
    special_tokens = tokenizer.num_special_tokens_to_add(False)
    if max_length <= special_tokens:
        raise BundleError(
            f"max_length {max_length} leaves no room for text beside {special_tokens} special tokens; "
            f"it must be at least {special_tokens + 1}"
        )
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Within this context a panic of the Rust side is a RuntimeError, and not a BaseException, which no handler of errors catches."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise RuntimeError(str(error)) from error


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder/tokenizer.json` as it was saved, without dropout. BundleError when the file cannot be read."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise BundleError(f"{folder} has no tokenizer.json; save a fast tokenizer there")
    try:
        with panics_are_errors():
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.num_special_tokens_to_add(False)  # panics where the post-processor is not whole
    except Exception as error:  # the Rust side raises plain Exception
        raise BundleError(f"{file} is not a tokenizer ({error}); save a fast tokenizer there") from error
    drop_no_merges(tokenizer)
    return tokenizer


def drop_no_merges(tokenizer: Tokenizer) -> float | None:
    """Switch off the dropout of merges, by which a text gets other tokens each time; what it was, or None if it was off."""
    dropout: float | None = getattr(tokenizer.model, "dropout", None) or None
    if dropout is not None:
        tokenizer.model.dropout = None
    return dropout


def without_rowless_tokens(tokenizer: Tokenizer, rows: int | None) -> Tokenizer:
    """`tokenizer` without the special tokens whose id is `rows` or more; the same object if it has none, or if `rows` is None.

    One that stands for unknown words or around every text stays: no text can be read without it.
    """
    if rows is None:
        return tokenizer
    rowless = {
        id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if id >= rows and token.special
    }
    if not rowless:
        return tokenizer
    said: dict[str, Any] = json.loads(tokenizer.to_str())
    model, around = said["model"], json.dumps(said["post_processor"])
    unknown = model.get("unk_token") or model.get("unk_id")
    for id, token in list(rowless.items()):
        if unknown in (token, id) or json.dumps(token) in around:
            del rowless[id]
    said["added_tokens"] = [token for token in said["added_tokens"] if token["id"] not in rowless]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {token: id for token, id in vocabulary.items() if id not in rowless}
    else:  # Unigram: ids are places in a list
        while len(vocabulary) - 1 in rowless:
            vocabulary.pop()
    said["padding"] = None if (said["padding"] or {}).get("pad_id") in rowless else said["padding"]
    return Tokenizer.from_str(json.dumps(said))


def _embedding_rows(folder: Path) -> int | None:
    """The rows of the model's embedding by `folder/config.json`; None if it does not say."""
    try:
        rows = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return rows if isinstance(rows, int) else None
