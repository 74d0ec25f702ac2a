"""The settings of reading a task's data and training on it. No torch: the command line reads them for its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

# Settings that say how to find what is read; what was read decides about a training, and not these.
WHERE_DATA_IS = (
    "text_column",
    "text_pair_column",
    "label_column",
    "entities_column",
    "tokens_column",
    "tags_column",
    "data_revision",
)
AnySettings = TypeVar("AnySettings", bound="TaskSettings")


@dataclass(frozen=True)
class TaskSettings:
    """What reading the data of a task and training on it need; `stillroom run` adds its own to these."""

    teacher: str = ""  # transformers folder, or a Hub name
    task: str = ""  # token-classification or text-classification
    data: str = ""  # folder with train, validation and test files, or a `datasets` name
    student: str = "3x384"  # a name, or layers=5,hidden=320,heads=10,ffn=1280
    corpus: tuple[str, ...] = ()  # files of plain text for the relation stage
    unlabelled: tuple[str, ...] = ()  # files of in-domain text that the teacher labels
    augment: int = 0  # texts generated from each labelled one, which the teacher labels
    seed: int = 0
    threads: int = 0  # cores to train on; 0 is all that this process may use
    precision: str = "auto"  # of training: fp32, bf16, or auto: bf16 where the CPU or GPU multiplies it natively
    accumulate: int = 1  # parts that a step's batch is cut into, for memory; what is learned is the same
    trackers: tuple[str, ...] = ()  # where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow
    max_length: int = 0  # tokens; 0 is the longest that the teacher takes, at most 512
    batch: int = 32  # texts a training step
    new_head: bool = False  # fine-tune a new head even where the teacher has one for another set of labels
    teacher_epochs: int = 5  # at most; it stops when validation has stopped improving
    teacher_patience: int = 2  # epochs without a new best before it stops
    teacher_learning_rate: float = 1e-4
    relation_epochs: float = 0.0  # over the task's text and the corpus; 0 leaves the relation stage out
    relation_heads: int = 0  # 0 is the paper's 48, or the nearest below it that divides both widths
    relation_layer: int = 0  # the teacher's layer to learn from; 0 is the usual one
    relation_tokens: int = 128  # longest piece of the corpus
    relation_learning_rate: float = 5e-4
    student_epochs: int = 10  # over the labelled text, in steps: unlabelled and generated text adds variety, not time
    student_learning_rate: float = 4e-4
    temperature: float = 2.0  # of the soft labels
    soft_weight: float = 0.9  # of the soft labels; the labels have the rest
    out_of_scope: str = ""  # label of texts that the model has no answer to: not learned, it is to abstain from them
    checkpoint_seconds: float = 30.0  # work that a kill loses at most
    text_column: str = ""  # what the column of the text is called; `text` unless given
    text_pair_column: str = ""  # of the second text; `text_pair` unless given
    label_column: str = ""  # of the label; `label` unless given
    entities_column: str = ""  # of the entities; `entities` unless given
    tokens_column: str = ""  # of the words that have a tag each; `tokens` unless given
    tags_column: str = ""  # of their tags; `tags` or `ner_tags` unless given
    data_revision: str = ""  # branch, tag or commit of a data set on the Hub; its main branch unless given

    def faults(self) -> list[str]:
        """What is out of its range, a line each."""
        faults = []
        for name in ("teacher_learning_rate", "student_learning_rate", "relation_learning_rate", "temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                faults.append(f"`{name}` is {getattr(self, name)}; a number above 0 is needed")
        for name in ("batch", "accumulate", "teacher_epochs", "teacher_patience", "student_epochs", "relation_tokens"):
            if getattr(self, name) < 1:
                faults.append(f"`{name}` is {getattr(self, name)}; a whole number from 1 is needed")
        if not 0 <= self.soft_weight <= 1:
            faults.append(f"`soft_weight` is {self.soft_weight}; a share between 0 and 1 is needed")
        for name in ("seed", "augment", "threads", "max_length", "relation_epochs", "relation_heads", "relation_layer"):
            if not getattr(self, name) >= 0:
                faults.append(f"`{name}` is {getattr(self, name)}; it cannot be below 0")
        if self.precision not in ("auto", "fp32", "bf16", "fp16"):
            faults.append(f"`precision` is {self.precision!r}; it is auto, fp32, bf16 or, on GPUs, fp16")
        return faults


def typed(kind: type[AnySettings], values: dict[str, Any]) -> tuple[AnySettings, list[str]]:
    """Settings of `kind` with `values` in place of its defaults, and what is wrong with their types, a line each."""
    hints = get_type_hints(kind)
    faults: list[str] = []
    fitting: dict[str, Any] = {}
    for name, value in values.items():
        try:
            fitting[name] = _typed(name, value, hints[name])
        except ValueError as fault:
            faults.append(str(fault))
    return kind(**fitting), faults


def _typed(name: str, value: Any, kind: Any) -> Any:
    if kind in (tuple[str, ...],):
        items = [value] if isinstance(value, str | Path) else value
        items = (
            [str(item) if isinstance(item, Path) else item for item in items]
            if isinstance(items, list | tuple)
            else items
        )
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"`{name}` is {value!r}; a list of paths is needed")
        return tuple(items)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"`{name}` is {value!r}; {'a number' if kind is float else kind.__name__} is needed")
    return value
