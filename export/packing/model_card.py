"""The bundle's README.md: a model card for the Hub and for people."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve.bundle.manifest import TaskName
from serve.tasks import task_named
from serve.tasks.relations import RELATIONS
from serve.tasks.served_task import ServedTask

# stillroom's metric -> its name on the Hub.
HUB_METRICS = {
    "entity_f1": "f1", "accuracy": "accuracy", "micro_f1": "f1", "pearson": "pearsonr", "answer_f1": "f1",
    "similarity_spearman": "spearmanr",
}  # fmt: skip
# Methods and stages of a lineage that train without a teacher; None: the lineage names neither.
UNTAUGHT = frozenset({None, "none", "labels", "mlm", "mlm, then labels"})


@dataclass(frozen=True)
class Figure:
    """One row of the card's table: a model's score on the test split."""

    model: str
    """Such as "teacher" or "student, int8"."""
    metric: str
    """The metric's name on the Hub, such as "f1" or "accuracy"."""
    value: float
    low: float | None = None
    high: float | None = None
    """Ends of the bootstrap interval, where there is one."""
    size_bytes: int | None = None


@dataclass(frozen=True)
class CardFacts:
    """The facts on the card; an unknown one is left out."""

    name: str
    task: TaskName
    labels: Sequence[str]
    max_length: int
    figures: Sequence[Figure] = ()
    shipped: str | None = None
    """The `model` of the figure that is published as the model's result."""
    license: str | None = None
    """The model's licence, which is its teacher's if it has one: a short name of the Hub's, such as `apache-2.0`."""
    data_license: str | None = None
    base_model: str | None = None
    """The Hub name of the teacher, or of the checkpoint itself; never a local folder."""
    dataset: str | None = None
    language: str | None = None
    tags: Sequence[str] = ()
    lineage: Mapping[str, object] = field(default_factory=dict)
    """Where the model comes from: its `teacher`, its `method` or that method's last `stage`, and more."""
    report: bool = False
    """Whether `report.html` is beside the card."""
    limits: Sequence[str] = ()
    """Sentences: what the model was not made or measured for."""
    confidence: Sequence[str] = ()
    """Sentences: how reliable its probabilities are."""
    multi_label: bool = False
    """Whether any number of labels may apply to a text."""
    relations: bool = False
    """Whether labels name the relation between two marked parts of a text."""
    pairs: bool = False
    """Whether an input is a pair of texts."""
    single_texts: bool | None = None
    """Whether it is one text; None if unknown."""
    vector_width: int = 0
    """How many numbers the vector of a text has; 0 for a model that gives no vectors."""
    normalised: bool = False
    """Whether these vectors have length 1."""

    @property
    def distilled(self) -> bool:
        """Whether the lineage, or without one `base_model`, shows that the model was trained with a teacher."""
        if {"teacher", "checkpoint"} & set(self.lineage):
            return "teacher" in self.lineage and self.lineage.get("method", self.lineage.get("stage")) not in UNTAUGHT
        return self.base_model is not None


def model_card(facts: CardFacts) -> str:
    """The text of README.md: YAML front matter as the Hub defines it, then the same as text.

    Front matter: https://huggingface.co/docs/hub/model-cards. Every value is written as JSON, which is valid YAML, so
    that no label or name can break the block.
    """
    parts = [
        "---\n" + "\n".join(_front_matter(facts)) + "\n---",
        f"# {_cell(facts.name)}",
        _summary(facts),
        *_figures(facts),
        *(["## Confidence\n\n" + "\n".join(f"- {line}" for line in facts.confidence)] if facts.confidence else []),
        "## Use\n\n" + _use(facts),
        *_lineage(facts),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in _limits(facts)),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(facts: CardFacts) -> list[str]:
    """Lines of `key: value`."""
    metadata: dict[str, object] = {
        "license": facts.license,
        "language": facts.language,
        "base_model": facts.base_model,
        "datasets": [facts.dataset] if facts.dataset else None,
        "pipeline_tag": _task_of(facts).hub_task or facts.task,
        "tags": ["stillroom", "onnx", *(["distillation"] if facts.distilled else []), *facts.tags],
        "metrics": list(dict.fromkeys(figure.metric for figure in facts.figures)),
    }
    shipped = [figure for figure in facts.figures if figure.model == facts.shipped]
    if shipped and facts.dataset:  # the Hub accepts no result without a data set
        metadata["model-index"] = [
            {
                "name": facts.name,
                "results": [
                    {
                        "task": {"type": _task_of(facts).hub_task or facts.task},
                        "dataset": {"name": facts.dataset, "type": facts.dataset, "split": "test"},
                        "metrics": [{"type": figure.metric, "value": round(figure.value, 4)} for figure in shipped],
                    }
                ],
            }
        ]
    return [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in metadata.items() if value]


def _task_of(facts: CardFacts) -> ServedTask:
    return RELATIONS if facts.relations else task_named(facts.task)


def _summary(facts: CardFacts) -> str:
    task = _task_of(facts)
    teacher = f" from `{facts.base_model}`" if facts.base_model else ""
    if "teacher_answers_sha256" in facts.lineage:  # the teacher was a file, and the base model gave the first layers
        teacher = (
            f" from answers to texts, with first layers{teacher}," if facts.base_model else " from answers to texts"
        )
    made = (
        f"distilled{teacher} with stillroom and exported to ONNX"
        if facts.distilled
        else "exported to ONNX with stillroom"
    )
    names = task.label_names(facts.labels)
    shown = ", ".join(f"`{name}`" for name in names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
    listed = f"\n\nLabels ({len(names)}): {shown}." if task.names_labels else ""
    return (
        f"A small encoder that {task.does(facts)}, {made}. It reads {facts.max_length} tokens at once. "
        f"{task.longer_texts}{listed}"
    )


def _figures(facts: CardFacts) -> list[str]:
    if not facts.figures:
        return []
    lines = ["| model | metric | value | 95% interval | size |", "|---|---|---|---|---|"]
    for figure in facts.figures:
        known = figure.low is not None and figure.high is not None
        interval = f"{figure.low:.4f} to {figure.high:.4f}" if known else ""
        size = f"{figure.size_bytes / 1e6:.1f} MB" if figure.size_bytes is not None else ""
        name = f"**{_cell(figure.model)}**" if figure.model == facts.shipped else _cell(figure.model)
        lines.append(f"| {name} | {_cell(figure.metric)} | {figure.value:.4f} | {interval} | {size} |")
    rest = " `report.html` holds the rest, timings included." if facts.report else ""
    split = "On the test split, which was not used for training or for any choice."
    return [f"## Scores\n\n{split}{rest}\n\n" + "\n".join(lines)]


def _use(facts: CardFacts) -> str:
    task = _task_of(facts)
    if task.reads_markers:
        body = arguments = json.dumps(task.endpoint.example)
    else:
        body = json.dumps(dict.fromkeys(list(task.endpoint.example)[: 1 + task.needs_pair], "..."))
        arguments = '"...", text_pair="..."' if task.needs_pair else '"..."'
    return f"""As a server, from this folder:

```sh
stillroom serve . --port 8000
curl -s localhost:8000{task.endpoint.path} -H 'content-type: application/json' -d '{body}'
```

In Python:

```python
from stillroom import Pipeline

print(Pipeline(".")({arguments}))
```

Any program that runs ONNX can use `onnx/` with `tokenizer.json`; the files lie
where optimum and transformers.js look."""


def _lineage(facts: CardFacts) -> list[str]:
    if not facts.lineage:
        return []
    text = json.dumps(facts.lineage, ensure_ascii=False, indent=2, sort_keys=True)
    return ["## Lineage\n\n```json\n" + text + "\n```"]


def _limits(facts: CardFacts) -> list[str]:
    return [
        *facts.limits,
        *(
            ["Its scores hold for text like the test split; on other text, measure before use."]
            if facts.figures
            else []
        ),
        *(["It learned from its teacher, mistakes and biases included."] if facts.distilled else []),
        f"Licence of the model: {facts.license or 'not stated'}; of the data: {facts.data_license or 'not stated'}.",
    ]


def _cell(text: str) -> str:
    """`text` on one line, with `|` escaped."""
    return " ".join(text.split()).replace("|", "\\|")
