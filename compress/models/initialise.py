"""The student's first weights: parts of the teacher where shapes allow, otherwise transformers' initialisation."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from compress.models.families import FAMILIES, encoder_of, family_in, layers_of, linear
from compress.models.pretrained import (
    Opened,
    has_vocabulary_head,
    load_encoder,
    open_model,
    open_tokenizer,
    with_markers,
)
from compress.models.shapes import Shape, layer_map, spread_layers
from compress.models.tokenizer_files import PROBE
from serve.errors import BadInput
from serve.wording import one_of

SHOWN_TOKENS = 3


# Names of the choices of teacher layers.
STARTS = ("spread", "alternate", "first", "last", "layer-map")
RANDOM = "random"  # new layers


def is_checkpoint(start: str) -> bool:
    """Whether `start` names a checkpoint."""
    return start not in (*STARTS, RANDOM)


def starting_layers(name: str, teacher_layers: int, student_layers: int, *, map_name: str = "") -> tuple[int, ...]:
    """The teacher layers (from 1) that the layers of a student start from, by name; `student_of` takes them as `chosen`.

    `spread` is `spread_layers`. `alternate` takes every second layer from the first (DistilBERT, section 3: one layer out of
    two). `first` and `last` take the lowest and the highest (Patient knowledge distillation, 2019, takes the first).
    `layer-map` takes for each student layer the last teacher layer that it learns from by the layer map `map_name`; a layer
    that learns from none takes that of `spread`.

    Raises:
        BadInput: an unknown name or map, or a teacher with too few layers.

    >>> starting_layers("alternate", 12, 6), starting_layers("layer-map", 12, 4, map_name="uniform-consecutive")
    ((1, 3, 5, 7, 9, 11), (3, 6, 9, 12))
    """
    if name not in STARTS:
        raise BadInput(f"--start {name} is not known. Give {one_of(STARTS)}.")
    needed = 2 * student_layers - 1 if name == "alternate" else student_layers
    if teacher_layers < needed:
        raise BadInput(
            f"--start {name} for a student of {student_layers} layers needs a teacher of at least {needed} layers; this one has "
            f"{teacher_layers}. Give a shallower student, or --start random."
        )
    spread = spread_layers(teacher_layers, student_layers)
    if name == "layer-map":
        mapped = layer_map(map_name, teacher_layers, student_layers)
        return tuple(mapped.get(i, (layer,))[-1] for i, layer in enumerate(spread, 1))
    return {
        "spread": spread,
        "alternate": tuple(range(1, needed + 1, 2)),
        "first": tuple(range(1, student_layers + 1)),
        "last": tuple(range(teacher_layers - student_layers + 1, teacher_layers + 1)),
    }[name]


def student_of(
    teacher: Any, shape: Shape, *, seed: int, chosen: Sequence[int] = (), new_layers: bool = False
) -> tuple[Any, dict[str, str]]:
    """A student of `shape` and the teacher's class, and the origin of each of its parts.

    At the teacher's width embeddings and head are copied, layers are copied from `spread_layers` or the `chosen` ones (from 1),
    and a wider feed-forward layer keeps its units of largest norm. A narrower student gets word embeddings by truncated SVD
    (XtremeDistil, section 3.1: the first columns of `U S`); the rest is new. Of a deeper or wider student, parts that do not
    fit are new. With `new_layers` the layers are always new. BadInput if `chosen` does not fit the layers of both.
    """
    chosen = tuple(chosen) or spread_layers(teacher.config.num_hidden_layers, shape.layers)
    if len(chosen) != shape.layers or not all(1 <= layer <= teacher.config.num_hidden_layers for layer in chosen):
        raise BadInput(
            f"The layers {', '.join(map(str, chosen))} were chosen; a student of {shape.layers} layers needs {shape.layers} of the "
            f"teacher's layers 1 to {teacher.config.num_hidden_layers}. Give as many of these."
        )
    fits = layers_fit(teacher.config, shape) and not new_layers
    config = student_config(teacher.config, shape)
    if fits and getattr(config, "layer_types", None):  # ModernBERT: a copied layer keeps its window
        config.layer_types = [teacher.config.layer_types[layer - 1] for layer in chosen]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = type(teacher)(config)
    with torch.no_grad():
        origin = _embeddings(teacher, student)
        origin |= _layers(teacher, student, shape, chosen) if fits else {"layers": "new"}
        origin |= _head(teacher, student)
    return student.eval(), origin


def student_config(teacher: Any, shape: Shape) -> Any:
    """The configuration of a student of `shape`, of a teacher with the configuration `teacher`. Layers of several kinds keep theirs."""
    config, family = copy.deepcopy(teacher), FAMILIES[teacher.model_type]
    config.num_hidden_layers = shape.layers
    config.hidden_size = shape.hidden
    config.num_attention_heads = shape.heads
    setattr(config, family.ffn_size, shape.ffn)
    if shape.activation:
        setattr(config, family.activation, shape.activation)
    if getattr(config, "embedding_size", None) == teacher.hidden_size:
        config.embedding_size = shape.hidden
    if getattr(config, "layer_types", None):  # ModernBERT
        config.layer_types = (config.layer_types * shape.layers)[: shape.layers]
    return config


def student_from(
    checkpoint: str, teacher: Opened, *, seed: int, vocabulary: bool = False
) -> tuple[Any, dict[str, str]]:
    """A student that starts from a checkpoint, and the origin of each of its parts, as from `student_of`.

    It may be of any size and of another family than its teacher, but must have the same tokenizer.

    Args:
        checkpoint: a transformers folder, or a Hub name.
        teacher: the model that it will learn from.
        seed: for parts that the checkpoint lacks.
        vocabulary: whether it needs a masked-language-model head.

    Raises:
        BadInput: it cannot be opened, is not an encoder of a known family, or has another tokenizer; or with `vocabulary` the
            sizes of the two vocabularies differ.
    """
    opened = open_start(checkpoint, teacher)
    theirs, ours = teacher.config.vocab_size, opened.config.vocab_size
    if vocabulary and theirs != ours:
        raise BadInput(
            f"{opened.role} {checkpoint} has a vocabulary of {ours} tokens and {teacher.role} {teacher.name} one of {theirs}, but this "
            "method compares predictions of tokens. Give another --start, or a method on hidden states or attention (minilmv2)."
        )
    student = load_encoder(opened, seed=seed, vocabulary=vocabulary).eval()
    head = "none"
    if vocabulary:
        head = f"{opened.public_name}'s" if has_vocabulary_head(opened) else "new"
    return student, {"embeddings": f"{opened.public_name}'s", "layers": f"{opened.public_name}'s", "head": head}


def open_start(checkpoint: str, teacher: Opened) -> Opened:
    """The checkpoint that a student starts from; it gets the markers of relations where the teacher does.

    Raises BadInput: it cannot be opened, is not an encoder of a known family, or has another tokenizer than the teacher.
    """
    opened = open_model(checkpoint, role="--start")
    if teacher.added:
        opened = with_markers(opened)
    check_same_tokens(teacher, opened)
    return opened


def shape_in(opened: Opened) -> Shape:
    """The shape of the model in a folder."""
    config = opened.config
    ffn = int(getattr(config, opened.family.ffn_size))
    return Shape(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, ffn)


def check_same_tokens(teacher: Opened, student: Opened) -> None:
    """Check that the tokenizers of both models give the same ids: for their vocabularies and for a probe text.

    Raises BadInput: the tokenizers differ; the message names a difference.
    """
    if differs := differing_tokenizers(teacher, student):
        raise BadInput(
            f"{student.role} {student.name} and {teacher.role} {teacher.name} do not share a tokenizer: {differs} A student learns token "
            "by token from its teacher, so both must split text the same way. Give a checkpoint with the teacher's tokenizer, or start "
            "from the teacher's layers; or let the student learn the answers of a teacher that is fine-tuned on the task, whatever its "
            "tokenizer: stillroom run --teacher TEACHER --start STUDENT ..."
        )


def differing_tokenizers(teacher: Opened, student: Opened) -> str:
    """The first difference of the tokenizers of both models, as text; empty if they give the same ids.

    Raises BadInput: one cannot be opened.
    """
    theirs, ours = open_tokenizer(teacher), open_tokenizer(student)
    theirs.no_truncation()  # the models may differ in their longest text
    ours.no_truncation()
    return _differing_tokens(theirs, ours) or _differing_reading(theirs, ours)


def _differing_tokens(theirs: Tokenizer, ours: Tokenizer) -> str:
    """The first tokens whose ids differ, as text; empty if none do."""
    teacher, student = (tokenizer.get_vocab(with_added_tokens=True) for tokenizer in (theirs, ours))
    apart = [token for token in {**teacher, **student} if teacher.get(token) != student.get(token)]
    if not apart:
        return ""
    apart.sort(key=lambda token: min(known[token] for known in (teacher, student) if token in known))
    named = [
        f"{token!r} is {teacher.get(token, 'missing')} in the teacher's ids and {student.get(token, 'missing')} in the student's"
        for token in apart[:SHOWN_TOKENS]
    ]
    return f"of {len(teacher)} and {len(student)} tokens {len(apart)} differ; {'; '.join(named)}."


def _differing_reading(theirs: Tokenizer, ours: Tokenizer) -> str:
    """The first difference of the two tokenizers on the probe text, as text; empty if there is none."""
    teacher, student = theirs.encode(PROBE), ours.encode(PROBE)
    if teacher.ids == student.ids:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(teacher.ids, student.ids, strict=False)) if a != b), None)
    if at is None:
        return f"a probe text has {len(teacher.ids)} tokens by the teacher's tokenizer and {len(student.ids)} by the student's."
    text = PROBE[slice(*teacher.offsets[at])]
    return (
        f"their vocabularies agree, but token {at} of a probe text ({text!r}) is {teacher.tokens[at]!r} ({teacher.ids[at]}) by the "
        f"teacher's and {student.tokens[at]!r} ({student.ids[at]}) by the student's."
    )


def _embeddings(teacher: Any, student: Any) -> dict[str, str]:
    ours, theirs = student.get_input_embeddings(), teacher.get_input_embeddings()
    width = ours.weight.shape[1]
    if width == theirs.weight.shape[1]:
        _copy_part(encoder_of(teacher), encoder_of(student), "embeddings")
        if hasattr(encoder_of(student), "embeddings_project") and width != student.config.hidden_size:
            _copy_part(encoder_of(teacher), encoder_of(student), "embeddings_project")
        return {"embeddings": "the teacher's"}
    if width > theirs.weight.shape[1]:
        return {"embeddings": "new"}
    ours.weight.copy_(truncated(theirs.weight, width))
    return {
        "embeddings": f"truncated SVD of the teacher's, {theirs.weight.shape[1]} to {width}; positions and segments new"
    }


def truncated(embedding: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` columns of `U S` of the SVD of `embedding` (rows, d), as (rows, width).

    `U S = embedding V`, and `V` is computed from the small `(d, d)` Gram matrix, in float64.
    """
    wide = embedding.double()
    _, vectors = torch.linalg.eigh(wide.T @ wide)  # ascending
    v = vectors.flip(1)[:, :width]
    # The sign of an eigenvector is arbitrary; make its largest entry positive so that equal inputs give equal students.
    v = v * torch.sign(v.gather(0, v.abs().argmax(dim=0, keepdim=True)))
    product: torch.Tensor = (wide @ v).to(embedding.dtype)
    return product


def layers_fit(config: Any, shape: Shape) -> bool:
    """Whether a student of `shape` can start from layers of a teacher of this configuration."""
    return bool(
        shape.hidden == config.hidden_size
        and shape.heads == config.num_attention_heads
        and shape.layers <= config.num_hidden_layers
    )


def _layers(teacher: Any, student: Any, shape: Shape, chosen: Sequence[int]) -> dict[str, str]:
    theirs, ours, family = layers_of(teacher), layers_of(student), family_in(teacher)
    # Parts shared by all layers: a norm after the last, a bias by distance.
    apart = [name for name, _ in encoder_of(student).named_children() if name not in {"embeddings", "pooler"}]
    for name in apart:
        _copy_matching(
            encoder_of(teacher).get_submodule(name),
            encoder_of(student).get_submodule(name),
            but=(id(x) for x in ours.parameters()),
        )
    fewer = False
    for layer, number in zip(ours, chosen, strict=True):
        source = theirs[number - 1]
        wide, narrow = linear(source, family.ffn_in), linear(layer, family.ffn_in)
        if narrow.out_features > wide.out_features:
            _copy_matching(source, layer)
            continue
        out, wide_out = linear(layer, family.ffn_out), linear(source, family.ffn_out)
        kept = largest_units(wide, wide_out, out.in_features)
        fewer |= len(kept) < wide_out.in_features
        _copy_matching(source, layer)
        # A gated unit has one row in each half.
        rows = torch.cat([kept + half * wide_out.in_features for half in range(family.ffn_rows)])
        narrow.weight.copy_(wide.weight[rows])
        if narrow.bias is not None:
            narrow.bias.copy_(wide.bias[rows])
        out.weight.copy_(wide_out.weight[:, kept])
        if out.bias is not None:
            out.bias.copy_(wide_out.bias)
    units = f", the {shape.ffn} feed-forward units of largest norm" if fewer else ""
    return {"layers": f"teacher layers {', '.join(map(str, chosen))}{units}"}


def largest_units(ffn_in: nn.Linear, ffn_out: nn.Linear, count: int) -> torch.Tensor:
    """Indices, ascending, of the `count` feed-forward units with the largest product of incoming and outgoing norm."""
    incoming = ffn_in.weight.norm(dim=1).view(-1, ffn_out.in_features).norm(dim=0)  # of both rows of a gated unit
    strength = incoming * ffn_out.weight.norm(dim=0)
    kept: torch.Tensor = strength.topk(count).indices.sort().values
    return kept


def _head(teacher: Any, student: Any) -> dict[str, str]:
    if teacher.config.hidden_size != student.config.hidden_size:
        return {"head": "new"}
    inside = encoder_of(teacher)
    # For an encoder without a head `encoder_of` is the model itself: its children are not heads.
    children = {} if inside is teacher else dict(teacher.named_children())
    heads = {name: module for name, module in children.items() if module is not inside}
    for name, module in heads.items():
        _copy_matching(module, student.get_submodule(name))
    if getattr(inside, "pooler", None) is not None:
        _copy_part(inside, encoder_of(student), "pooler")
    return {"head": "the teacher's"}


def _copy_part(source: nn.Module, target: nn.Module, name: str) -> None:
    _copy_matching(source.get_submodule(name), target.get_submodule(name))


def _copy_matching(source: nn.Module, target: nn.Module, but: Iterable[int] = ()) -> None:
    """Copy each parameter whose name and shape agree, other than those of the ids `but`."""
    theirs, left = dict(source.named_parameters()), set(but)
    for name, ours in target.named_parameters():
        if name in theirs and theirs[name].shape == ours.shape and id(ours) not in left:
            ours.copy_(theirs[name])
