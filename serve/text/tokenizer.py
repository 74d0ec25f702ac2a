"""The bundle's tokenizer, without padding and cut at the model's length."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from serve.errors import BundleError, is_panic


def load_tokenizer(folder: Path, max_length: int) -> Tokenizer:
    """The tokenizer in `folder/tokenizer.json`.

    Padding is switched off (the session pads to the longest text of a batch), and truncation is set to `max_length` tokens,
    special tokens included. `encoding.overflowing` holds what was cut off. BundleError when the file cannot be read, or when
    `max_length` leaves no room beside the special tokens.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise BundleError(f"{folder} has no tokenizer.json; save a fast tokenizer there")
    try:
        with panics_are_errors():
            tokenizer = Tokenizer.from_file(str(file))
            special_tokens = tokenizer.num_special_tokens_to_add(False)
    except Exception as error:  # the Rust side raises plain Exception
        raise BundleError(f"{file} is not a tokenizer ({error}); save a fast tokenizer there") from error
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
