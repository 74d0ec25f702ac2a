"""Opens the tokenizer of a model's folder: what its tokenizer.json says, without tokens that the embedding has no row for."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase, Sequence

from compress.distributed import warn
from compress.models.configurations import in_one_line, quiet
from compress.models.sentence_pooling import lowers_texts
from serve.errors import BadInput, BundleError
from serve.text.tokenizer import drop_no_merges, panics_are_errors, read_tokenizer, without_rowless_tokens

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER_JSON, "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model")
MEND_TOKENIZER = "Copy the folder again, or save the tokenizer again with save_pretrained."
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
STEPS = (
    "normalizer",
    "pre_tokenizer",
    "model",
    "post_processor",
)  # what decides the ids of a text, beside added tokens

# Text that tokenizers with the same vocabulary may split differently: case, accents, digits, scripts, spaces, long words.
PROBE = (
    "The QUICK brown fox isn't in Zürich, naïve café: 3.14159 + 2,000 = £2003.14? e-mail me@example.org\t#42_under  two spaces "
    "pneumonoultramicroscopicsilicovolcanoconiosis Ελληνικά русский 東京タワー हिन्दी عربي 👩‍🚀 ﬁne \u00ad½ İstanbul ẞ"
)

UNKNOWN = "𒀀ꙮ"  # letters that no normalizer drops, and that few vocabularies have


def fast_tokenizer(folder: Path, named: str, config: Any) -> Any:
    """The fast tokenizer in `folder`, as transformers holds it. Messages name the model as `named`.

    It gives the ids of tokenizer.json, if there is one. From the class that tokenizer_config.json names transformers 5 makes a tokenizer
    anew, and 4 changes what the file says: a warning says so where this gives other ids. A special token whose id has no row in the
    embedding of `config` is dropped with a warning, so a text that spells it is read as plain characters. Where sentence-transformers
    lowers each text, so does this tokenizer.

    Raises:
        BadInput: it cannot be opened, has no fast form, has other ids that the embedding has no rows for, or no token for unknown words.
    """
    theirs, fault = _by_class(folder)
    by_class: Tokenizer | None = theirs.backend_tokenizer if theirs and theirs.is_fast else None
    model = (_json_in(folder / TOKENIZER_JSON) or {}).get("model")
    stated = model.get("dropout") if isinstance(model, dict) else None
    if dropout := (by_class and drop_no_merges(by_class)) or stated:
        warn(
            f"{named}: its tokenizer has a dropout of {dropout}, by which a text gets other tokens each time; it is switched off, in "
            "training and in answers."
        )
    own = by_class
    if (folder / TOKENIZER_JSON).is_file() and (theirs or _json_in(folder / TOKENIZER_CONFIG) is not None):
        in_file = _of_file(folder, named)
        if by_class is None or not _same(by_class, in_file):
            _warn_of_class(by_class, in_file, folder, named, fault)
            own = _with_tokens_of(in_file, by_class)
    if own is None:
        there = ", ".join(name for name in TOKENIZER_FILES if (folder / name).is_file()) or "its files"
        raise BadInput(
            f"{named} has a slow tokenizer ({fault}), which gives no character offsets. Save a fast one (tokenizer.json) into the folder."
            if theirs
            else f"{named}: its tokenizer cannot be opened from {there} ({fault}). {MEND_TOKENIZER}"
        )
    if cuts_left := _cuts_left(folder, theirs, own):
        warn(
            f"{named}: the truncation_side of its tokenizer is left, which is not read: texts that are too long are cut at "
            "their end, in training and in answers."
        )
    kept = without_rowless_tokens(_lowering(own) if lowers_texts(folder) else own, rows_of(config))
    _warn_of_dropped(set(own.get_vocab()) - set(kept.get_vocab()), folder, named)
    check_ids(kept, config, named)
    _check_unknown_words(kept, named)
    if kept is not by_class:
        theirs = _wrapped(kept, theirs, folder)
    if cuts_left:
        theirs.truncation_side = theirs.init_kwargs["truncation_side"] = "right"  # what is saved says what was done
    return theirs


def check_ids(tokenizer: Tokenizer, config: Any, named: str) -> None:
    """Check that the embedding of `config` has a row for every id of the tokenizer. BadInput names the model as `named`."""
    rows, vocabulary = rows_of(config), tokenizer.get_vocab()
    if rows is None or not vocabulary:
        return
    token = max(vocabulary, key=lambda token: vocabulary[token])
    if vocabulary[token] >= rows:
        raise BadInput(
            f"{named}: its tokenizer has ids up to {vocabulary[token]} ({token!r}), but its embedding has only {rows} rows. "
            "Call model.resize_token_embeddings(len(tokenizer)) and train the new rows, or save the tokenizer that the model was "
            "trained with."
        )


def _check_unknown_words(tokenizer: Tokenizer, named: str) -> None:
    try:
        with panics_are_errors():
            tokenizer.encode(UNKNOWN)
    except Exception as error:  # the Rust side raises plain Exception
        raise BadInput(
            f"{named}: its tokenizer fails at a word that it does not know ({in_one_line(error)}). Add a token for unknown words ([UNK]) "
            "to its vocabulary and a row for it to the embedding, or save the tokenizer that the model was trained with."
        ) from error


def rows_of(config: Any) -> int | None:
    """The rows of the embedding of `config`; None if it does not say."""
    rows = getattr(config, "vocab_size", None)
    return rows if isinstance(rows, int) else None


def _by_class(folder: Path) -> tuple[Any, str]:
    """The tokenizer of the class that the folder names, and its name if it is slow; or None, and why it cannot be opened."""
    from transformers import AutoTokenizer

    try:
        with quiet(), panics_are_errors():
            found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The tokenizer classes raise any kind of error.
        return None, in_one_line(error)
    return found, type(found).__name__


def _of_file(folder: Path, named: str) -> Tokenizer:
    try:
        return read_tokenizer(folder)
    except BundleError as error:
        raise BadInput(
            f"{named}: its tokenizer cannot be opened from {TOKENIZER_JSON} ({in_one_line(error)}). {MEND_TOKENIZER}"
        ) from None


def _same(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether both have the same steps, and `one` all added tokens of `other`."""
    added = one.get_added_tokens_decoder()
    return all(_state(getattr(one, step)) == _state(getattr(other, step)) for step in STEPS) and all(
        str(added.get(id)) == str(token) for id, token in other.get_added_tokens_decoder().items()
    )


def _state(step: Any) -> str:
    """A step of a tokenizer as JSON; empty if it is None."""
    if step is None:
        return ""
    written: bytes = step.__getstate__()
    # Two ways to write that the pieces of a word have no affix.
    return written.decode().replace('_prefix":null', '_prefix":""').replace('_suffix":null', '_suffix":""')


def _warn_of_class(own: Tokenizer | None, in_file: Tokenizer, folder: Path, named: str, fault: str) -> None:
    """Warn where the class cannot be opened, or reads `PROBE` otherwise than the file."""
    named_class = (_json_in(folder / TOKENIZER_CONFIG) or {}).get("tokenizer_class") or fault
    if own is None:
        warn(
            f"{named}: the tokenizer_class {named_class} of its {TOKENIZER_CONFIG} gives no fast tokenizer ({fault}); "
            f"{TOKENIZER_JSON} is read instead."
        )
    elif any(_ids(own, *texts) != _ids(in_file, *texts) for texts in ((PROBE,), (PROBE, PROBE))):
        warn(
            f"{named}: its {TOKENIZER_JSON} and the class {fault}, which transformers makes of its {TOKENIZER_CONFIG}, give "
            f"different tokens for the same text; {TOKENIZER_JSON} is read."
        )


def _ids(tokenizer: Tokenizer, text: str, pair: str | None = None) -> list[int] | None:
    """The ids of a text, or of a pair; None if the tokenizer fails."""
    try:
        with panics_are_errors():
            return list(tokenizer.encode(text, pair).ids)
    except Exception:  # the Rust side raises plain Exception
        return None


def _with_tokens_of(in_file: Tokenizer, by_class: Tokenizer | None) -> Tokenizer:
    """`in_file`, and the added tokens that only `by_class` has, such as those of added_tokens.json."""
    known = in_file.get_vocab()
    tokens = sorted(by_class.get_added_tokens_decoder().items()) if by_class else []
    in_file.add_tokens([token for _, token in tokens if token.content not in known])
    return in_file


def _lowering(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` behind a lowering of the text, as sentence-transformers puts it; itself if it lowers already."""
    steps = _state(tokenizer.normalizer)
    if '"Lowercase"' in steps or '"lowercase":true' in steps:
        return tokenizer
    found = Tokenizer.from_str(tokenizer.to_str())
    found.normalizer = Sequence([Lowercase(), *([tokenizer.normalizer] if tokenizer.normalizer else [])])
    return found


def _warn_of_dropped(tokens: set[str], folder: Path, named: str) -> None:
    """Warn of dropped `tokens` that the folder names; the defaults of a class are not worth a word."""
    files = [folder / name for name in (TOKENIZER_JSON, TOKENIZER_CONFIG) if (folder / name).is_file()]
    texts = "".join(file.read_text(encoding="utf-8") for file in files) if tokens else ""
    if told := sorted(token for token in tokens if token in texts):
        warn(
            f"{named}: its embedding has no row for the special {'token' if len(told) == 1 else 'tokens'} {', '.join(told)} of "
            "its tokenizer; a text that holds one is read as plain characters."
        )


def _cuts_left(folder: Path, theirs: Any, own: Tokenizer) -> bool:
    """Whether the tokenizer was saved to cut texts at their beginning."""
    stated = (_json_in(folder / TOKENIZER_CONFIG) or {}).get("truncation_side")
    return "left" in (stated, getattr(theirs, "truncation_side", ""), (own.truncation or {}).get("direction"))


def _wrapped(tokenizer: Tokenizer, theirs: Any, folder: Path) -> Any:
    """`tokenizer` as transformers holds it, with the special tokens and limits of `theirs`, or of the folder if that is None."""
    from transformers import PreTrainedTokenizerFast

    stated = _json_in(folder / TOKENIZER_CONFIG) or {}
    known = tokenizer.get_vocab()
    settings: dict[str, Any] = {}
    for name in SPECIAL_TOKENS:
        token = getattr(theirs, name, None) if theirs else stated.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content in known:
            settings[name] = content
    for name in ("model_max_length", "model_input_names"):
        if value := getattr(theirs, name, None) if theirs else stated.get(name):
            settings[name] = value
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    for step in STEPS:  # transformers may have changed some by its own defaults
        setattr(made.backend_tokenizer, step, getattr(tokenizer, step))
    return made


def _json_in(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`; empty without such a file, None if it holds none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
