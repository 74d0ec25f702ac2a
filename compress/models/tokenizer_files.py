"""Opens the tokenizer of a model's folder: what its tokenizer.json says, without tokens that the embedding has no row for."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase, Sequence

from compress.distributed import warn
from compress.models.configurations import damage_of, in_one_line, quiet, read_json
from compress.models.sentence_pooling import lowers_texts
from serve.errors import BadInput, BundleError
from serve.text.tokenizer import drop_no_merges, panics_are_errors, read_tokenizer, without_rowless_tokens

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ADDED_TOKENS, SPECIAL_MAP = "added_tokens.json", "special_tokens_map.json"
TOKENIZER_FILES = (TOKENIZER_JSON, "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model")
MEND_TOKENIZER = "Copy the folder again, or save the tokenizer again with save_pretrained."
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What decides the ids of a text, beside added tokens.
STEPS = ("normalizer", "pre_tokenizer", "model", "post_processor")

# Text that tokenizers with the same vocabulary may split differently: case, accents, digits, scripts, spaces, long words.
PROBE = (
    "The QUICK brown fox isn't in Zürich, naïve café: 3.14159 + 2,000 = £2003.14? e-mail me@example.org\t#42_under  two spaces "
    "pneumonoultramicroscopicsilicovolcanoconiosis Ελληνικά русский 東京タワー हिन्दी عربي 👩‍🚀 ﬁne \u00ad½ İstanbul ẞ"
)

UNKNOWN = "𒀀ꙮ"  # letters that no normalizer drops, and that few vocabularies have


def fast_tokenizer(folder: Path, named: str, config: Any) -> Any:
    """The fast tokenizer in `folder`, as transformers holds it. Messages name the model as `named`.

    It gives the ids of tokenizer.json, if there is one. From the class that tokenizer_config.json names transformers 5 makes a
    tokenizer anew, and 4 changes what the file says: a warning says so where this gives other ids. A special token whose id has
    no row in the embedding of `config` is dropped with a warning, so a text that spells it is read as plain characters. Where
    sentence-transformers lowers each text, so does this tokenizer. Raises BadInput: it cannot be opened, has no fast form, has
    other ids that the embedding has no rows for, or no token for unknown words.
    """
    for file in (TOKENIZER_CONFIG, ADDED_TOKENS, SPECIAL_MAP):
        if (folder / file).is_file():
            read_json(folder, file, named)
    theirs, fault = _by_class(folder)
    by_class: Tokenizer | None = theirs.backend_tokenizer if theirs and theirs.is_fast else None
    model = (_json_in(folder / TOKENIZER_JSON) or {}).get("model")
    stated = model.get("dropout") if isinstance(model, dict) else None
    if dropout := (by_class and drop_no_merges(by_class)) or stated:
        warn(
            f"{named}: its tokenizer has a dropout of {dropout}, by which a text gets other tokens each time; it is switched off, in "
            "training and in answers."
        )
    own, left = by_class, list[str]()
    if (folder / TOKENIZER_JSON).is_file():
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
    _check_stated_ids(own, folder, named)
    for side, does in (
        ("truncation", "texts that are too long are cut at their end"),
        ("padding", "texts are padded at their end"),
    ):
        if is_left := _is_left(side, folder, theirs, own):
            warn(
                f"{named}: the {side}_side of its tokenizer is left, which is not read: {does}, in training and in answers."
            )
        left += [f"{side}_side"] * is_left
    if _leaves_out_types(folder, own, config):
        warn(
            f"{named}: model_input_names of its tokenizer leaves out token_type_ids, which is not read: the second text of a pair has "
            "the type 1, in training and in answers."
        )
    kept = without_rowless_tokens(_lowering(own) if lowers_texts(folder) else own, rows_of(config))
    _warn_of_dropped(set(own.get_vocab()) - set(kept.get_vocab()), folder, named)
    check_ids(kept, config, named)
    _check_unknown_words(kept, named)
    if kept is not by_class:
        theirs = _wrapped(kept, theirs, folder)
    for name in left:  # what is saved says what was done
        setattr(theirs, name, "right")
        theirs.init_kwargs[name] = "right"
    return theirs


def check_ids(tokenizer: Tokenizer, config: Any, named: str) -> None:
    """Check that the embedding of `config` has a row for every id of the tokenizer. BadInput names the model as `named`."""
    rows, vocabulary = rows_of(config), tokenizer.get_vocab()
    if rows is None or not vocabulary:
        return
    by_id: dict[int, str] = {}
    if twice := next((token for token, id in sorted(vocabulary.items()) if by_id.setdefault(id, token) != token), None):
        raise BadInput(
            f"{named}: its tokenizer gives the tokens {by_id[vocabulary[twice]]!r} and {twice!r} one id, {vocabulary[twice]}. "
            f"{MEND_TOKENIZER}"
        )
    around = _encoded(tokenizer, "", "")
    for word, id in zip(around.tokens, around.ids, strict=True) if around else ():
        if vocabulary.get(word) != id:
            raise BadInput(
                f"{named}: its tokenizer puts {word!r} around texts as id {id} (post_processor in {TOKENIZER_JSON}), and the id of that "
                f"token is {vocabulary.get(word)}. {MEND_TOKENIZER}"
            )
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
            f"{named}: its tokenizer cannot be opened from {TOKENIZER_JSON} ({damage_of(folder / TOKENIZER_JSON, error)}). {MEND_TOKENIZER}"
        ) from None


def _same(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether both have the same steps, and `one` all added tokens of `other`, found in texts by the same rules."""
    added = one.get_added_tokens_decoder()
    return all(_state(getattr(one, step)) == _state(getattr(other, step)) for step in STEPS) and all(
        repr(added.get(id)) == repr(token) for id, token in other.get_added_tokens_decoder().items()
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
        return
    tokens = [token.content for token in in_file.get_added_tokens_decoder().values()]
    added = "".join(f"x {token} {token.lower()}{token}x" for token in tokens)
    texts = ((PROBE,), (PROBE, PROBE), (added,))
    theirs, ours = ([getattr(_encoded(one, *text), "ids", None) for text in texts] for one in (own, in_file))
    if theirs != ours:
        warn(
            f"{named}: its {TOKENIZER_JSON} and the class {fault}, which transformers makes of its {TOKENIZER_CONFIG}, give "
            f"different tokens for the same text; {TOKENIZER_JSON} is read."
        )


def _encoded(tokenizer: Tokenizer, text: str, pair: str | None = None) -> Encoding | None:
    """The tokens of a text, or of a pair; None if the tokenizer fails."""
    try:
        with panics_are_errors():
            return tokenizer.encode(text, pair)
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


def _is_left(side: str, folder: Path, theirs: Any, own: Tokenizer) -> bool:
    """Whether the tokenizer was saved to do the `side`, truncation or padding, at the beginning of texts."""
    stated = (_json_in(folder / TOKENIZER_CONFIG) or {}).get(f"{side}_side")
    return "left" in (stated, getattr(theirs, f"{side}_side", ""), (getattr(own, side) or {}).get("direction"))


def _leaves_out_types(folder: Path, own: Tokenizer, config: Any) -> bool:
    """Whether the folder has types of tokens left out, by which its tokenizer and its model tell the texts of a pair apart."""
    inputs = (_json_in(folder / TOKENIZER_CONFIG) or {}).get("model_input_names") or ["token_type_ids"]
    pair = _encoded(own, "a", "a")
    return bool(
        pair and 1 in pair.type_ids and "token_type_ids" not in inputs and getattr(config, "type_vocab_size", 0) > 1
    )


def _check_stated_ids(own: Tokenizer, folder: Path, named: str) -> None:
    """BadInput if a file of the folder gives a token that tokenizer.json lacks another id than it gets; a warning if it has the token."""
    stated = dict((_json_in(folder / ADDED_TOKENS) or {}).items())
    in_config = (_json_in(folder / TOKENIZER_CONFIG) or {}).get("added_tokens_decoder")
    for id, token in (in_config if isinstance(in_config, dict) else {}).items():
        stated[str(token.get("content") if isinstance(token, dict) else token)] = id
    in_file = json.dumps((_json_in(folder / TOKENIZER_JSON) or {}).get("added_tokens"))
    for token, id in stated.items():
        if own.token_to_id(token) in (None, id) or str(own.token_to_id(token)) == str(id):
            continue
        said = f"{named}: a file beside its tokenizer ({ADDED_TOKENS} or {TOKENIZER_CONFIG}) gives the token {token!r} the id {id}"
        if json.dumps(token) not in in_file:
            raise BadInput(f"{said}, and it would get {own.token_to_id(token)} here. {MEND_TOKENIZER}")
        warn(f"{said}, and {TOKENIZER_JSON} {own.token_to_id(token)}, which is read.")


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
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
