"""How a folder of sentence-transformers makes the vector of a text: its `modules.json`, read and written."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.distributed import warn
from compress.models.configurations import read_json
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

if TYPE_CHECKING:
    from compress.losses.vectors import Pooling  # which imports torch

MODULES, SETTINGS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
# The names of SETTINGS in older versions, which sentence-transformers reads, too.
OLD_SETTINGS = tuple(
    f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# What those settings may say without changing a vector, beside `max_seq_length` and `do_lower_case`; None is a default of each.
PLAIN = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
HARMLESS_ARGUMENTS = frozenset((
    "add_pooling_layer", "attn_implementation", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage", "torch_dtype",
    "trust_remote_code", "use_cache", "use_fast", "use_safetensors", "padding_side",
))  # fmt: skip
OF_POOLING = frozenset({"word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode"})
TOKENIZER_CONFIG = "tokenizer_config.json"
LEAST_TOKENS = 8
POOLING, NORMALIZE = "1_Pooling", "2_Normalize"
MEND = "Copy the folder again."
# As in sentence-transformers: the key of each pooling in its configuration.
KEYS: "dict[str, Pooling]" = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
MODES: "dict[str, Pooling]" = {"mean": "mean", "cls": "first"}  # of its later versions


@dataclass(frozen=True)
class SentencePooling:
    """How the last hidden states of a text become its vector, and whether that has length 1."""

    pooling: "Pooling" = "mean"
    normalised: bool = True


def pooling_in(folder: Path, named: str = "") -> SentencePooling | None:
    """What `modules.json` in `folder` says; None without such a file. Errors name the model as `named`, or by its folder.

    Raises:
        BadInput: a damaged file, another pooling than mean or first token, or a module that changes vectors, such as a dense layer.
    """
    if not (folder / MODULES).is_file():
        return None
    named = named or str(folder)
    modules = read_json(folder, MODULES, named, list)
    if not all(isinstance(module, dict) for module in modules):
        raise BadInput(f"{named}: {MODULES} is not a list of modules. {MEND}")
    types = [str(module.get("type", "")) for module in modules]
    # A module of another package may have any name.
    kinds = [kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind for kind in types]
    if len(kinds) < 2 or kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Normalize", "Dropout"}:
        raise BadInput(
            f"{named} makes its vectors by {', '.join(kinds) or 'no module'} ({MODULES}); an encoder, its mean or first token, and a "
            "normalisation are known here. Save the encoder without other modules."
        )
    if inner := str(modules[0].get("path") or ""):
        raise BadInput(_is_inside(named, inner))
    _check_own_settings(folder, named)
    place, *further = [str(module.get("path") or POOLING) for module in modules[1:]]
    if outside := [each for each in (place, *further) if Path(each).is_absolute() or ".." in Path(each).parts]:
        raise BadInput(f"{named}: {MODULES} names the folder {outside[0]}, which is outside the model's. {MEND}")
    for file in (f"{each}/config.json" for each, kind in zip(further, kinds[2:], strict=True) if kind == "Normalize"):
        stated = read_json(folder, file, named) if (folder / file).is_file() else {}
        _refuse(named, file, [key for key, value in stated.items() if value not in (None, "sentence_embedding")])
    config = read_json(folder, f"{place}/config.json", named)
    mode = config.get("pooling_mode")
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    found = [MODES.get(mode)] if isinstance(mode, str) else [KEYS.get(key) for key in chosen] if mode is None else []
    if len(found) != 1 or found[0] is None:
        raise BadInput(
            f"{named} pools by {mode or ' and '.join(chosen) or 'nothing'} ({place}/config.json); the mean of the tokens or the first "
            "token alone is known here."
        )
    unknown = [
        key for key, value in config.items() if value and key not in OF_POOLING and not key.startswith("pooling_mode_")
    ]
    if config.get("include_prompt") is False and any(_own_prompts(folder, named).values()):
        unknown.append("include_prompt")  # the mean of a text's tokens without those of its prompt
    _refuse(named, f"{place}/config.json", unknown)
    how = SentencePooling(found[0], "Normalize" in kinds)
    similarity = _prompt_settings(folder, named).get("similarity_fn_name") or "cosine"
    if similarity != "cosine" and not how.normalised:
        warn(
            f"{named}: similarity_fn_name is {similarity} in {PROMPTS}, which is not read: distill and evaluate compare vectors by their "
            "cosine, whatever their lengths."
        )
    return how


def _refuse(named: str, file: str, keys: list[str]) -> None:
    """BadInput if `keys` of `file`, which are not read here, change vectors."""
    if keys:
        raise BadInput(
            f"{named}: {file} has {', '.join(keys)}, by which sentence-transformers may make other vectors and which is not read here. "
            "Save the encoder without it, or take it out if the model was not trained with it."
        )


def max_tokens_in(folder: Path, limit: int) -> int:
    """The longest text in tokens by the folder's settings, or else by its tokenizer's; at most `limit`, which it is if neither says."""
    own = _settings(folder)[1].get("max_seq_length")
    stated = (
        read_json(folder, TOKENIZER_CONFIG, str(folder)) if not own and (folder / TOKENIZER_CONFIG).is_file() else {}
    )
    length = own or stated.get("model_max_length")
    return min(int(length), limit) if isinstance(length, int | float) and length >= LEAST_TOKENS else limit


def lowers_texts(folder: Path) -> bool:
    """Whether sentence-transformers lowers each text before it goes to the tokenizer of `folder`."""
    return bool(_settings(folder)[1].get("do_lower_case"))


def refuse_inner_encoder(folder: Path, named: str) -> None:
    """BadInput if `modules.json` says that the encoder is in a folder below `folder`, as older versions wrote it."""
    modules = read_json(folder, MODULES, named, list) if (folder / MODULES).is_file() else []
    if modules and isinstance(modules[0], dict) and (inner := str(modules[0].get("path") or "")):
        raise BadInput(_is_inside(named, inner))


def warn_of_activation(config: Any, named: str) -> None:
    """Warn if `config` is that of a CrossEncoder whose scores are not what its head gives, which is what is read here."""
    own = getattr(config, "sentence_transformers", None)
    stated = (
        own.get("activation_fn")
        if isinstance(own, dict)
        else getattr(config, "sbert_ce_default_activation_function", None)
    )
    if stated is None and not isinstance(own, dict):
        return
    usual = "Sigmoid" if config.num_labels == 1 else "Identity"  # as in sentence-transformers
    activation = str(stated or usual).rpartition(".")[2]
    if activation != "Identity":
        given = "the number before it" if config.num_labels == 1 else "the probabilities of its labels"
        warn(
            f"{named}: its config.json names the activation {activation} for a CrossEncoder, which is left out: a score here is {given}."
        )


def forget_activation(config: Any) -> None:
    """Take what a CrossEncoder's head was from `config`, since that head is replaced."""
    for name in ("sentence_transformers", "sbert_ce_default_activation_function"):
        if hasattr(config, name):
            delattr(config, name)


def _is_inside(named: str, inner: str) -> str:
    return (
        f"{named}: its encoder is in {inner} ({MODULES} says so), an older layout of sentence-transformers. Move the files of {inner} into "
        f'the folder itself, and write "path": "" for that module in {MODULES}.'
    )


def _check_own_settings(folder: Path, named: str) -> None:
    """BadInput for a prompt before each text or settings that change vectors; a warning if callers may ask for either."""
    said, prompts = _prompt_settings(folder, named), _own_prompts(folder, named)
    default = said.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise BadInput(
            f"{named}: default_prompt_name is {default!r} in {PROMPTS}, none of its prompts ({', '.join(prompts) or 'none'}). Make "
            "it null there, or name one."
        )
    if prompt := prompts.get(str(default)):
        raise BadInput(
            f"{named}: sentence-transformers puts the prompt {prompt!r} before each text (default_prompt_name in {PROMPTS}), which is not "
            "done here. Make default_prompt_name null there, and put the prompt before the texts yourself."
        )
    if named_prompts := [name for name, prompt in prompts.items() if prompt]:
        warn(
            f"{named}: {PROMPTS} has prompts ({', '.join(named_prompts)}), which are not put before texts here; send texts that begin with "
            "them."
        )
    if width := said.get("truncate_dim"):
        warn(
            f"{named}: truncate_dim is {width} in {PROMPTS}, which is not read: vectors have all their numbers, and callers ask for fewer."
        )
    strange: list[str] = []
    file, settings = _settings(folder)
    for key, value in settings.items():
        if key in ARGUMENTS and isinstance(value, dict):
            strange += [f"{key}.{inner}" for inner in value if inner not in HARMLESS_ARGUMENTS]
        elif value not in (None, {}, PLAIN.get(key)) and key not in ("max_seq_length", "do_lower_case", "unpad_inputs"):
            strange.append(key)
    _refuse(named, file, strange)


def _prompt_settings(folder: Path, named: str) -> dict[str, Any]:
    """What callers of the encoder get by default; empty without a file that says so."""
    found: dict[str, Any] = read_json(folder, PROMPTS, named) if (folder / PROMPTS).is_file() else {}
    return found


def _own_prompts(folder: Path, named: str) -> dict[str, str]:
    prompts = _prompt_settings(folder, named).get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise BadInput(f"{named}: prompts in {PROMPTS} is not an object of texts. {MEND}")
    return prompts


def _settings(folder: Path) -> tuple[str, dict[str, Any]]:
    """The file of the encoder's settings and what it says; of the first that says anything."""
    for name in (SETTINGS, *OLD_SETTINGS):
        found: dict[str, Any] = read_json(folder, name, str(folder)) if (folder / name).is_file() else {}
        length, lowers = found.get("max_seq_length"), found.get("do_lower_case")
        if length is not None and (type(length) is not int or length < LEAST_TOKENS):
            raise BadInput(
                f"{folder}: max_seq_length is {length!r} in {name}; null or a whole number from {LEAST_TOKENS} on is needed."
            )
        if lowers not in (None, False, True):
            raise BadInput(f"{folder}: do_lower_case is {lowers!r} in {name}; true, false or null is needed.")
        if found:
            return name, found
    return SETTINGS, {}


def write_pooling(folder: Path, how: SentencePooling, width: int, max_tokens: int) -> None:
    """Write the files by which sentence-transformers opens the checkpoint in `folder` as an encoder of sentences."""
    package = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.Transformer"},
        {"idx": 1, "name": "1", "path": POOLING, "type": f"{package}.Pooling"},
    ]
    if how.normalised:
        modules.append({"idx": 2, "name": "2", "path": NORMALIZE, "type": f"{package}.Normalize"})
    pooling = {"word_embedding_dimension": width} | {key: value == how.pooling for key, value in KEYS.items()}
    for file, content in (
        (folder / MODULES, modules),
        (folder / POOLING / "config.json", pooling),
        (folder / SETTINGS, {"max_seq_length": max_tokens, "do_lower_case": False}),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(canonical_json(content))
