"""Every setting of a run in one place: read from a TOML file, overridden by flags, written back resolved."""

import dataclasses
import difflib
import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from serve.errors import BadInput


@dataclass(frozen=True)
class Recipe:
    """The settings of `stillroom run`. Those without a default must be given."""

    teacher: str = ""  # transformers folder, or a Hub name
    task: str = ""  # token-classification or text-classification
    data: str = ""  # folder with train, validation and test files, or a `datasets` name
    out: str = ""  # the bundle to write
    student: str = "3x384"  # a name, or layers=5,hidden=320,heads=10,ffn=1280
    name: str = ""  # what the server calls the model; the name of `out` unless given
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
    undistilled: bool = True  # train the same student on labels only too, to compare with
    teacher_gate: float = 0.97  # least share of the teacher's metric that the shipped variant keeps, on validation
    gate: float = 0.99  # least share of the fp32 metric that int8 keeps, on validation
    out_of_scope: str = ""  # label of texts that the model has no answer to: not learned, it is to abstain from them
    keep_right: float = 0.95  # without such texts: share of right answers that abstaining keeps; 0 is never to abstain
    max_minutes: float = 0.0  # fit the training to this many minutes; 0 is no limit
    latency_seconds: float = 60.0  # for timing teacher and student, in all
    checkpoint_seconds: float = 30.0  # work that a kill loses at most

    @property
    def model_name(self) -> str:
        """What the server calls the model."""
        return self.name or Path(os.path.abspath(self.out)).name


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings in a TOML file.

    Raises:
        BadInput: no such file, not TOML, a key that is not a setting, or a value of the wrong type.
    """
    if not path.is_file():
        raise BadInput(f"The recipe {path} is not a file. Give a TOML file of settings, or the settings as flags.")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"The recipe {path} is not TOML: {error}.") from None
    known = {field.name for field in fields(Recipe)}
    unknown = [key for key in found if key not in known]
    if unknown:
        raise BadInput(
            f"The recipe {path} has {', '.join(map(_with_nearest, unknown))}; no such setting. Settings are: {', '.join(sorted(known))}."
        )
    return found


def resolve(settings: dict[str, Any], flags: dict[str, Any]) -> Recipe:
    """The recipe of a file's `settings` overridden by `flags` that are not None.

    Raises:
        BadInput: a setting that must be given is not, has the wrong type, or is out of its range.
    """
    unknown = [name for name in (*settings, *flags) if name not in Recipe.__dataclass_fields__]
    if unknown:
        raise BadInput(f"{', '.join(unknown)}: no such setting. Settings are {', '.join(Recipe.__dataclass_fields__)}.")
    merged = settings | {name: value for name, value in flags.items() if value is not None}
    hints = get_type_hints(Recipe)
    faults: list[str] = []
    values: dict[str, Any] = {}
    for name, value in merged.items():
        try:
            values[name] = _typed(name, value, hints[name])
        except ValueError as fault:
            faults.append(str(fault))
    recipe = dataclasses.replace(Recipe(), **values)
    faults += [f"--{name} is needed" for name in ("teacher", "task", "data", "out") if not getattr(recipe, name)]
    faults += _out_of_range(recipe)
    if faults:
        raise BadInput("; ".join(faults) + ". `stillroom run --help` says what each setting is for.")
    return recipe


def _with_nearest(unknown: str) -> str:
    near = difflib.get_close_matches(unknown, [field.name for field in fields(Recipe)], n=1)
    return f"{unknown} (did you mean {near[0]}?)" if near else unknown


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


def _out_of_range(recipe: Recipe) -> list[str]:
    faults = []
    for name in ("teacher_learning_rate", "student_learning_rate", "relation_learning_rate", "temperature"):
        if not 0 < getattr(recipe, name) < float("inf"):
            faults.append(f"`{name}` is {getattr(recipe, name)}; a number above 0 is needed")
    for name in ("batch", "accumulate", "teacher_epochs", "teacher_patience", "student_epochs", "relation_tokens"):
        if getattr(recipe, name) < 1:
            faults.append(f"`{name}` is {getattr(recipe, name)}; a whole number from 1 is needed")
    for name in ("soft_weight", "gate", "teacher_gate", "keep_right"):
        if not 0 <= getattr(recipe, name) <= 1:
            faults.append(f"`{name}` is {getattr(recipe, name)}; a share between 0 and 1 is needed")
    for name in (
        "seed",
        "augment",
        "threads",
        "max_length",
        "relation_epochs",
        "max_minutes",
        "latency_seconds",
        "relation_heads",
        "relation_layer",
    ):
        if not getattr(recipe, name) >= 0:
            faults.append(f"`{name}` is {getattr(recipe, name)}; it cannot be below 0")
    if recipe.precision not in ("auto", "fp32", "bf16", "fp16"):
        faults.append(f"`precision` is {recipe.precision!r}; it is auto, fp32, bf16 or, on GPUs, fp16")
    return faults


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML, every setting spelled out, so that it runs again as it ran."""
    import tomli_w

    values = {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(recipe).items()}
    return tomli_w.dumps(values)


def listed(text: str) -> tuple[str, ...]:
    """The names in `text`, with commas between them, each once.

    >>> listed("fp32, int8,fp32")
    ('fp32', 'int8')
    """
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
