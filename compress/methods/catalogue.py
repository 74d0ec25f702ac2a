"""The methods of the papers, as data: each is a short list of stages with their objective and text.

`docs/reference/methods.md` explains each; formulas are in `compress/losses/`. "Ours" marks a choice that the paper leaves open.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from compress.data.encoded import IGNORED
from compress.losses.vectors import Pooling
from compress.methods.objectives import DIRECT, LayerTerm, Objective, OutputTerm, check_objective
from compress.models.families import is_multilingual
from compress.models.initialise import layers_fit, starting_layers
from compress.models.shapes import Shape, covering, layer_map
from serve.errors import BadInput


@dataclass(frozen=True)
class Stage:
    """One training: its objective, its text, the part of the student that trains, and its share of the method's tokens."""

    name: str
    objective: Objective
    # `corpus` is plain text without labels; `task` is the task's text, with a teacher fine-tuned on the task; `source` is
    # another task's text and teacher, after which the student keeps all but its head; `pairs` are texts and what to generate of them.
    text: Literal["corpus", "task", "source", "pairs"] = "corpus"
    trains: Literal["all", "encoder", "head"] = "all"
    pack: bool = False  # whether pieces of plain text share rows of full length (`compress.data.sampler`)
    share: float = 1.0
    tokens: float = 0.0  # in place of the share of a budget; 0 keeps that
    batch: int = 0  # in place of the batch that all stages have; 0 keeps that
    learning_rate: float = 5e-4
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    layer_is_given: bool = False  # whether the user named the teacher layer, which is kept then whatever it does


@dataclass(frozen=True)
class Sizes:
    """The sizes of teacher and student, and choices; 0 or an empty string leaves a choice to the method."""

    teacher_layers: int
    student_layers: int
    teacher_width: int
    student_width: int
    relation_heads: int = 0
    teacher_layer: int = 0
    layer_map: str = ""
    copied_layers: tuple[int, ...] = ()  # the teacher layer that each layer of the student starts from; empty: none
    pooling: Pooling = "mean"  # how the teacher makes the vector of a text
    family: str = ""  # of the teacher, as `FAMILIES` name it
    multilingual: bool = False  # whether the teacher was made for many languages


VOCABULARY_LABELS = OutputTerm("labels", "vocabulary")
# Training on a task's labels, as `stillroom run` trains.
LABELS = Stage(
    "labels",
    Objective(outputs=(OutputTerm("labels", "classes"),)),
    text="task",
    learning_rate=4e-4,
    warmup=0.06,
    betas=(0.9, 0.999),
)
# A masked-language-model head for teachers that were published without theirs. Only the head trains: the encoder and its embeddings, which
# the head shares, do not change.
HEAD_STAGE = Stage("head for masked words", Objective(outputs=(VOCABULARY_LABELS,)), trains="head", learning_rate=1e-3)


def labels_and_soft_labels(share: float, temperature: float) -> Stage:
    """Training on labels and on a teacher's logits, computed once, which have this share of the loss of each labelled row.

    Rows without a label have the whole of theirs from the teacher, unless the share is 0.
    """
    soft = OutputTerm("kept soft labels", "classes", share, temperature, shared=share > 0)
    return replace(LABELS, objective=Objective(outputs=(OutputTerm("labels", "classes", 1 - share, shared=True), soft)))


def with_class_weights(stage: Stage, targets: np.ndarray) -> Stage:
    """`stage` with weights in its loss on labels by which classes count alike over `targets` (texts,), and a text 1 on average."""
    classes, counts = np.unique(targets[targets != IGNORED], return_counts=True)
    weights = np.zeros(int(classes.max()) + 1)
    weights[classes] = counts.sum() / (len(classes) * counts)
    outputs = tuple(
        replace(term, class_weights=tuple(weights.tolist())) if term.loss == "labels" else term
        for term in stage.objective.outputs
    )
    return replace(stage, objective=replace(stage.objective, outputs=outputs))


METHODS: dict[str, Callable[[Sizes], tuple[Stage, ...]]] = {
    # Relations of queries, keys and values of one teacher layer (MiniLMv2; comparative analysis, eqs 7-9).
    "minilmv2": lambda sizes: _of_one_layer("relation", sizes),
    # Attention and value relation of the last layer (MiniLM, section 3).
    "minilm": lambda sizes: _minilm(*_last_attention(sizes, LayerTerm("relation", "values", 0, 0))),
    # Queries, keys and values of one teacher layer through a matrix per head (comparative analysis, eq. 10).
    "directminilm": lambda sizes: _of_one_layer("direct", sizes),
    # Hidden states through a matrix per pair of layers (comparative analysis, eq. 6).
    "hidden-states": lambda sizes: (
        Stage("hidden-states", _hidden_states(sizes.layer_map or usual_layer_map(sizes), sizes)),
    ),
    # Hidden states first, then the teacher's distribution over the vocabulary (comparative analysis, eq. 5 and appendix B). The second
    # stage compares every real token of masked text (ours). The paper trains 7 epochs of the first and 3 of the second.
    "output-distribution": lambda sizes: (
        Stage("hidden-states", _hidden_states(sizes.layer_map or "uniform+last", sizes), share=0.7),
        Stage(
            "output-distribution",
            Objective(outputs=(OutputTerm("soft labels", "vocabulary", everywhere=True),)),
            share=0.3,
            learning_rate=3e-4,
        ),
    ),
    # The teacher's vector of each text, and its similarities to the others of the batch (ours).
    "sentence-vectors": lambda sizes: (Stage("sentence-vectors", _vectors(sizes), betas=(0.9, 0.999)),),
    # Embeddings, hidden states and attention scores by a uniform map, on plain text (TinyBERT, section 3).
    "tinybert-general": lambda sizes: (Stage("tinybert-general", _tinybert(sizes)),),
    # The general step, then the same on the task's text, then soft labels (TinyBERT, section 3). Shares of tokens are ours.
    "tinybert": lambda sizes: (
        Stage("tinybert-general", _tinybert(sizes), share=0.5),
        Stage("tinybert-task", _tinybert(sizes), text="task", share=0.25),
        Stage(
            "tinybert-soft-labels",
            Objective(outputs=(OutputTerm("soft labels", "classes"),)),
            text="task",
            share=0.25,
            learning_rate=1e-4,
        ),
    ),
    # The sum of soft labels at temperature 2, masked language modelling and cosine of the last hidden states (DistilBERT, section 3).
    # Soft labels are compared at masked tokens, and all three have weight 1 (ours).
    "distilbert": lambda sizes: (
        Stage(
            "distilbert",
            Objective(
                (LayerTerm("cosine", "hidden", sizes.teacher_layers, sizes.student_layers),),
                (OutputTerm("soft labels", "vocabulary", temperature=2.0), VOCABULARY_LABELS),
            ),
        ),
    ),
    # The teacher's distribution over the vocabulary at masked tokens (a baseline of MiniLM).
    "mlm-kd": lambda _: (Stage("mlm-kd", Objective(outputs=(OutputTerm("soft labels", "vocabulary"),))),),
    # Masked language modelling without a teacher (the baseline BERT_SMALL of MiniLM).
    "mlm": lambda _: (Stage("mlm", Objective(outputs=(VOCABULARY_LABELS,))),),
    # XtremeDistil's algorithm 1: hidden states and attention, then logits, then labels; before each of the last two stages the head trains
    # alone. Shares are ours.
    "xtremedistil": lambda sizes: _xtremedistil(sizes, printed=False),
    # The same with the losses of stage one summed as equations 8 and 9 print them; attention is then next to nothing.
    "xtremedistil-printed": lambda sizes: _xtremedistil(sizes, printed=True),
    # XtremeDistil on a source task, then the task itself with a new head (XtremeDistil, section 2.2). Shares are ours.
    "xtremedistil-transfer": lambda sizes: (
        *(replace(stage, text="source", share=stage.share / 2) for stage in _xtremedistil(sizes)),
        replace(LABELS, share=0.5),
    ),
    # No distillation: labels alone, starting from parts of the teacher that was fine-tuned on the task.
    "labels": lambda _: (LABELS,),
    # The teacher's soft labels at temperature 2 (weight 0.9) and the labels (0.1), as in `stillroom run` (Hinton et al. 2015).
    "soft-labels": lambda _: (
        replace(
            LABELS,
            name="soft-labels",
            objective=Objective(
                outputs=(
                    OutputTerm("labels", "classes", 0.1),
                    OutputTerm("soft labels", "classes", 0.9, temperature=2.0),
                )
            ),
        ),
    ),
    # The ablation of MiniLM without the value relation (MiniLM, Table 5).
    "minilm-no-value-relation": lambda sizes: _minilm(*_last_attention(sizes)),
    # The ablation of MiniLM that compares values directly, through a matrix only if the widths differ (MiniLM, Table 6).
    "minilm-value-mse": lambda sizes: _minilm(
        *_last_attention(sizes, LayerTerm("mse", "values", 0, 0, projection=_mapped("values", sizes)))
    ),
    # The ablation of MiniLM with the relation of hidden states, split like values (ours), instead of values.
    "minilm-hidden-relation": lambda sizes: _minilm(*_last_attention(sizes, LayerTerm("relation", "hidden", 0, 0))),
    # The ablation of MiniLM with the same losses at every layer of a uniform map (MiniLM, Table 7).
    "minilm-layer-to-layer": lambda sizes: _minilm(
        *(
            LayerTerm(loss, of, theirs, ours)
            for ours, theirs in _pairs(_covering("uniform", sizes), sizes)
            for loss, of in (("kl", "scores"), ("relation", "values"))
        )
    ),
    # DirectMiniLM with matrices of orthonormal rows; and, which these lead to, with products of tokens in place of relations
    # (comparative analysis, section 3 and eq. 11).
    "directminilm-orthogonal": lambda sizes: _of_one_layer("orthogonal", sizes),
    "directminilm-products": lambda sizes: _of_one_layer("products", sizes),
    # The ablation of XtremeDistil without the stages that train the head alone (XtremeDistil, Table 9).
    "xtremedistil-no-freezing": lambda sizes: _without_head_stages(_xtremedistil(sizes)),
    # The ablation of XtremeDistil without the attention loss (XtremeDistil, Table 9).
    "xtremedistil-no-attention": lambda sizes: _xtremedistil(sizes, attention=False),
    # The ablation of XtremeDistil with the hidden states of the last layer alone, without attention (XtremeDistil, Table 9, b).
    "xtremedistil-last-layer": lambda sizes: _xtremedistil(sizes, attention=False, last=True),
}


def stages_of(method: str, sizes: Sizes) -> tuple[Stage, ...]:
    """The stages of `method` for these sizes.

    Raises:
        BadInput: an unknown method, or a layer map that does not fit.
    """
    if method not in METHODS:
        raise BadInput(f"The method {method!r} is not known. Give one of {', '.join(METHODS)}.")
    return METHODS[method](sizes)


def chain_of(
    method: str, shapes: Sequence[Shape], teacher: Any, *, start: str = "", **choices: Any
) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each of `shapes`: the first learns from a teacher of that configuration, each other from the one before.

    All but the last are assistants. `start` is the name of the layers that students start from where they fit (see
    `compress.models.initialise.starting_layers`); empty means new layers. A layer then learns relations, and XtremeDistil's
    representations, from the layer that it starts from, unless `choices` say otherwise, which are fields of `Sizes` that a method reads.

    Raises:
        BadInput: an unknown method; heads, layers or widths that it cannot compare.
    """
    chain: list[tuple[Stage, ...]] = []
    # Assistants are of their teacher's family and languages.
    choices |= {"family": getattr(teacher, "model_type", ""), "multilingual": is_multilingual(teacher)}
    for shape in shapes:
        copied: tuple[int, ...] = ()
        if start and layers_fit(teacher, shape):
            names = (start, teacher.num_hidden_layers, shape.layers)
            copied = starting_layers(*names, map_name=choices.get("layer_map", ""))
        widths = (teacher.hidden_size, shape.hidden)
        sizes = Sizes(teacher.num_hidden_layers, shape.layers, *widths, copied_layers=copied, **choices)
        stages = stages_of(method, sizes)
        ours = shape.as_config()
        for stage in stages:
            check_objective(stage.objective, teacher, ours)
        chain.append(stages)
        teacher = ours
    return tuple(chain)


def usual_teacher_layer(sizes: Sizes, *, direct: bool = False) -> int:
    """The teacher layer that was best for students of this size (comparative analysis, Table 3).

    For a teacher of `L` >= 12 layers of English it is `L - 1` if the student has 6 or more layers and is narrower than the teacher,
    or has 6 or more layers of any width with DirectMiniLM (`direct`); otherwise `L - 2`. For a multilingual teacher it is `L - 1`,
    whatever the student; DirectMiniLM has the same as in English, since no layer was best for GLUE and XNLI both. A teacher of 24 layers
    teaches by its layer 21, or of RoBERTa's and XLM-RoBERTa's family 19 (MiniLMv2, section 4). For a shallower teacher, which the papers
    do not test, it is `L - 1` (ours).
    """
    if sizes.teacher_layers == 24:
        return 19 if sizes.family in ("roberta", "xlm-roberta") else 21
    deep = sizes.student_layers >= 6
    narrower = sizes.student_width < sizes.teacher_width
    by_languages = sizes.multilingual and not direct
    below = 1 if sizes.teacher_layers < 12 or by_languages or (deep and (direct or narrower)) else 2
    return max(1, sizes.teacher_layers - below)


def usual_layer_map(sizes: Sizes) -> str:
    """The map that was best for students of this size (comparative analysis, Table 3), or `spread` where it leaves the last layer
    without a term.

    In English it is `single` for 3 layers or fewer, otherwise `uniform+last` at the teacher's width and `uniform-consecutive` at another.
    Of a multilingual teacher it is that with the best XNLI: `uniform` for 3 layers or fewer, otherwise `uniform+last`.
    """
    few = sizes.student_layers <= 3
    if sizes.multilingual:
        return _covering("uniform" if few else "uniform+last", sizes)
    if few:
        return "single"
    usual = "uniform+last" if sizes.student_width == sizes.teacher_width else "uniform-consecutive"
    return _covering(usual, sizes)


def _covering(name: str, sizes: Sizes) -> str:
    return covering(name, sizes.teacher_layers, sizes.student_layers)


def _pairs(name: str, sizes: Sizes) -> list[tuple[int, int]]:
    """(student layer, teacher layer) of a map."""
    mapped = layer_map(name, sizes.teacher_layers, sizes.student_layers)
    return [(ours, theirs) for ours, several in mapped.items() for theirs in several]


def _mapped(name: str, sizes: Sizes) -> str:
    """The learned map `name`, if the widths differ."""
    return name if sizes.student_width != sizes.teacher_width else ""


def _minilm(*terms: LayerTerm) -> tuple[Stage, ...]:
    return (Stage("minilm", Objective(terms), pack=True),)


def _last_attention(sizes: Sizes, *more: LayerTerm) -> tuple[LayerTerm, ...]:
    """The attention of the last layers, and the terms `more` of the same layers."""
    last = (sizes.teacher_layers, sizes.student_layers)
    return (
        LayerTerm("kl", "scores", *last),
        *(replace(term, teacher_layer=last[0], student_layer=last[1]) for term in more),
    )


def _of_one_layer(loss: Literal["relation", "direct", "orthogonal", "products"], sizes: Sizes) -> tuple[Stage, ...]:
    """Queries, keys and values of the student's last layer, of one teacher layer: their relations, they themselves, or their products."""
    direct = loss != "relation"
    layer = sizes.teacher_layer or (sizes.copied_layers or (0,))[-1] or usual_teacher_layer(sizes, direct=direct)
    # As many heads as the paper's 48 if that divides both widths, otherwise the largest number below that does.
    usual = max(n for n in range(1, 49) if sizes.teacher_width % n == 0 and sizes.student_width % n == 0)
    heads = 0 if direct else sizes.relation_heads or usual
    terms = [
        LayerTerm(loss, of, layer, sizes.student_layers, heads=heads, projection=of if loss in DIRECT else "")
        for of in ("queries", "keys", "values")
    ]
    name = "directminilm" if direct else "minilmv2"
    return (Stage(name, Objective(tuple(terms)), pack=True, layer_is_given=bool(sizes.teacher_layer)),)


def _hidden_states(name: str, sizes: Sizes) -> Objective:
    return Objective(
        tuple(
            LayerTerm("mse", "hidden", theirs, ours, projection=f"{ours} to {theirs}")
            for ours, theirs in _pairs(name, sizes)
        )
    )


def _vectors(sizes: Sizes) -> Objective:
    """The vectors are compared through a matrix if the widths differ; similarities need none."""
    last = (sizes.teacher_layers, sizes.student_layers)
    mapped = _mapped("vectors", sizes)
    return Objective(
        (
            LayerTerm("text cosine", "hidden", *last, projection=mapped, pooling=sizes.pooling),
            LayerTerm("similarities", "hidden", *last, pooling=sizes.pooling),
        )
    )


def _tinybert(sizes: Sizes) -> Objective:
    terms = [LayerTerm("mse", "hidden", 0, 0, projection="embeddings")]
    for ours, theirs in _pairs(_covering("uniform", sizes), sizes):
        terms.append(LayerTerm("mse", "hidden", theirs, ours, projection="hidden"))
        terms.append(LayerTerm("mse", "scores", theirs, ours))
    return Objective(tuple(terms))


def _xtremedistil(
    sizes: Sizes, *, attention: bool = True, printed: bool = False, last: bool = False
) -> tuple[Stage, ...]:
    """Algorithm 1. Each layer learns from the teacher layer that it starts from, a new one `i` from `L - M + i`.

    The embeddings are one pair more, as in the authors' code: of copied layers with the teacher's embeddings, of new ones with
    layer `L - M`. Losses are the means of that code (microsoft/xtreme-distil-transformers, `models.py`), added up over pairs;
    with `printed` the sums of equations 8 and 9, and with `last` those of the last pair alone.
    """
    count = sizes.student_layers
    pairs = list(enumerate(sizes.copied_layers, 1)) or _pairs("last", sizes)
    of_hidden, of_scores, weight = ("half squares", "squares", 1 / count) if printed else ("mse", "mean squares", 1.0)
    terms: list[LayerTerm] = []
    embeddings = (0, 0 if sizes.copied_layers else sizes.teacher_layers - count)
    for ours, theirs in pairs[-1:] if last else [embeddings, *pairs]:
        terms.append(LayerTerm(of_hidden, "hidden", theirs, ours, weight, projection=f"layer {ours}", bias=True))
        if attention and ours:
            terms.append(LayerTerm(of_scores, "scores", theirs, ours, weight))
    logits = Objective(outputs=(OutputTerm("logits", "classes"),))
    labels = Objective(outputs=(OutputTerm("labels", "classes"),))
    return (
        Stage("representations", Objective(tuple(terms)), text="task", trains="encoder", share=0.4),
        Stage("logits-head", logits, text="task", trains="head", share=0.1),
        Stage("logits", logits, text="task", share=0.2, learning_rate=2e-4),
        Stage("labels-head", labels, text="task", trains="head", share=0.1),
        Stage("labels", labels, text="task", share=0.2, learning_rate=1e-4),
    )


def _without_head_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages that train more than the head, with the shares of all tokens."""
    kept = [stage for stage in stages if stage.trains != "head"]
    rest = sum(stage.share for stage in kept)
    return tuple(replace(stage, share=stage.share / rest) for stage in kept)
