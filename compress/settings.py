"""The settings of `distill`, `finetune` and the training part of `run`, each stated once (see `serve.options`). No torch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from compress.data.examples import GENERATION
from compress.methods.presets import PRESETS, preset_of
from compress.models.layer_maps import LAYER_MAPS
from compress.models.shapes import FORM, STUDENTS, USUAL_STUDENT
from compress.training.trackers import TRACKERS
from serve.options import check, setting
from serve.task import TaskName

VECTORS = "feature-extraction"
TASKS = tuple(task for task in get_args(TaskName) if task != VECTORS)  # those that labels teach
# Methods that need plain text alone, in the order of docs/reference/methods.md; the last four are ablations.
TextMethod = Literal[
    "minilmv2", "minilm", "directminilm", "hidden-states", "output-distribution", "sentence-vectors", "tinybert-general",
    "distilbert", "mlm-kd", "mlm",
    "minilm-no-value-relation", "minilm-value-mse", "minilm-hidden-relation", "minilm-layer-to-layer",
]  # fmt: skip
TEXT_METHODS: tuple[str, ...] = get_args(TextMethod)
# Methods that need a task, or a task and plain text.
TASK_METHODS = (
    "soft-labels", "labels", "tinybert", "xtremedistil", "xtremedistil-transfer", "xtremedistil-no-freezing", "xtremedistil-no-attention",
)  # fmt: skip
AUTO = "auto"
STARTS = ("spread", "alternate", "first", "last", "layer-map", "random")  # or a checkpoint

# Training on few texts takes at least so many steps: a student, which starts from a fine-tuned teacher or at a higher rate, and a
# model that is fine-tuned. Validation ends the latter early (docs/measurements/accuracy.md, "Few labels").
LEAST_STEPS, LEAST_TUNING_STEPS = 1_000, 2_000
MOST_DISTILL_TOKENS = 3_000_000  # read of plain text unless a setting says otherwise

Ending = Literal["soft-labels", "labels"]
TrainingDevice = Literal["auto", "cpu", "cuda"]
TrainingPrecision = Literal["auto", "fp32", "bf16", "fp16"]

WHAT, DATA, TEACHER, STUDENT, MACHINE = (
    "What to make",
    "Data",
    "Teacher",
    "Student",
    "Machine",
)

COLUMNS = "Names in the data"
ANSWERS, ENDPOINT, MODEL = "What answers: one of", "An endpoint or a command", "The model of --with"
MODELS = "The models"

SHAPES = f"A name such as 3x384 (layers x width), or {FORM}; activation=relu may follow."
OWN_SHAPE = f"{USUAL_STUDENT}, or that of the checkpoint in --start"
ACCUMULATE = "Parts that each batch is computed in, one after the other; more parts need less memory."
TRACKER = "Tracker that gets the metrics too; metrics.jsonl is always written."
SEED = "Seed of all random numbers."
THREADS = "Threads of one model call: the cores to train on."
ALL_CORES = "all that this process may use"
PRECISION = (
    "Precision of training; auto is bf16 on a GPU that has it and on a CPU with AMX, otherwise fp32; fp16 needs a GPU."
)
DEVICE = "Device to train on; auto is a GPU if torch finds one, otherwise the CPU."
REVISION = "Branch, tag or commit of a Hub model."
UNLABELLED = "File of in-domain text that the teacher labels."
CORPUS = "File of plain text, one document a line."
TEACHER_LABELS = (
    "File of a teacher's answers to texts (docs/labelling.md), learned as soft labels; texts that the data lacks are read too. "
    "`stillroom label` writes such files."
)
SPLITS = "Folder with train, validation and test files, or a `datasets` name."


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """The name of the text column."""

    text_column: str = setting("", help="Column of the text.", shown="text", metavar="NAME", panel=COLUMNS)


@dataclass(frozen=True, kw_only=True)
class TextColumns(TextColumn):
    """The names of the columns that a text is read from."""

    text_pair_column: str = setting(
        "", help="Column of the second text of a pair.", shown="text_pair", metavar="NAME", panel=COLUMNS
    )
    tokens_column: str = setting(
        "", help="Column of the words, each of which has a tag.", shown="tokens", metavar="NAME", panel=COLUMNS
    )


@dataclass(frozen=True, kw_only=True)
class RowColumns(TextColumns):
    """The names of the columns of labelled rows."""

    label_column: str = setting("", help="Column of the label.", shown="label", metavar="NAME", panel=COLUMNS)
    entities_column: str = setting("", help="Column of the entities.", shown="entities", metavar="NAME", panel=COLUMNS)
    tags_column: str = setting(
        "", help="Column of the words' tags.", shown="tags or ner_tags", metavar="NAME", panel=COLUMNS
    )
    question_column: str = setting("", help="Column of the question.", shown="question", metavar="NAME", panel=COLUMNS)
    context_column: str = setting(
        "", help="Column of the text that may answer it.", shown="context", metavar="NAME", panel=COLUMNS
    )
    answers_column: str = setting("", help="Column of the answers.", shown="answers", metavar="NAME", panel=COLUMNS)


@dataclass(frozen=True, kw_only=True)
class DataSet(RowColumns):
    """The column names and the revision of a data set."""

    data_revision: str = setting(
        "", help="Branch, tag or commit of a data set on the Hub.", shown="its main branch", panel=COLUMNS
    )


# Fingerprints leave these out: the rows decide a training, not the names under which they were found.
WHERE_DATA_IS = tuple(field.name for field in fields(DataSet))


@dataclass(frozen=True, kw_only=True)
class TaskSettings(DataSet):
    """Settings for reading a task's data and training on it; `stillroom run` adds its own."""

    teacher: str = setting(
        "",
        help="Transformers folder or Hub name of a BERT-like encoder; with --start also of any other model with a head for the task, "
        "which is then asked for its answers.",
        shown="needed, unless --teacher-labels is given",
        panel=WHAT,
    )
    revision: str = setting("", help=REVISION, shown="its main branch", panel=WHAT)
    task: str = setting(help="Task of the model.", choices=TASKS, panel=WHAT)
    data: str = setting(help=SPLITS, panel=WHAT)
    student: str = setting(
        "", help=SHAPES, suggested=tuple(STUDENTS), metavar="SHAPE", shown=OWN_SHAPE, panel=WHAT,
    )  # fmt: skip
    method: str = setting(
        AUTO,
        help="How the student learns (docs/reference/methods.md); minilm@12x384 goes by way of an assistant of that shape. auto "
        "takes soft-labels, or minilmv2 first where the layers are new and --corpus is given.",
        suggested=(AUTO, *TEXT_METHODS, *TASK_METHODS), metavar="NAME", panel=WHAT,
    )  # fmt: skip
    corpus: tuple[str, ...] = setting(
        (), help="File of plain text, for methods that learn from it.", metavar="FILE", panel=DATA
    )
    unlabelled: tuple[str, ...] = setting((), help=UNLABELLED, metavar="FILE", panel=DATA)
    teacher_labels: tuple[str, ...] = setting(
        (), help=f"{TEACHER_LABELS} They take the place of --teacher; --start then names the encoder whose layers the student gets.",
        metavar="FILE", panel=DATA,
    )  # fmt: skip
    augment: int = setting(
        0,
        help="Texts generated from each labelled one, for the teacher to label.",
        at_least=0,
        at_most=1000,
        panel=DATA,
    )
    max_length: int = setting(
        0, help="Longest text in tokens.", at_least=0, shown="what the teacher takes, at most 512", panel=DATA
    )
    out_of_scope: str = setting(
        "", help="Label of texts that fit no class; the model abstains below a threshold chosen on them.", panel=DATA
    )
    language_temperature: float = setting(
        1.0, help="Evens out languages in training: 1 reads each text once an epoch, more reads those of small languages more often.",
        at_least=1, at_most=1000, panel=DATA,
    )  # fmt: skip
    new_head: bool = setting(False, help="Fine-tune a new head even if the teacher already has one.", panel=TEACHER)
    teacher_epochs: int | None = setting(
        None, help="Epochs of fine-tuning the teacher, at most; it stops when validation stops improving.",
        at_least=1, at_most=1_000_000, shown=f"5, and at least {LEAST_TUNING_STEPS:,} steps",
        panel=TEACHER,
    )  # fmt: skip
    teacher_patience: int = setting(
        2, help="Validations without a new best before training stops.", at_least=1, panel=TEACHER
    )
    teacher_learning_rate: float = setting(
        1e-4, help="Peak learning rate of fine-tuning the teacher.", above=0, panel=TEACHER
    )
    student_epochs: int | None = setting(
        None, help="Epochs over the labelled text, in steps: unlabelled and generated text adds variety, not time.",
        at_least=1, at_most=1_000_000, shown=f"10, and at least {LEAST_STEPS:,} steps",
        panel=STUDENT,
    )  # fmt: skip
    student_learning_rate: float = setting(
        4e-4, help="Peak learning rate of training the student.", above=0, panel=STUDENT
    )
    temperature: float = setting(2.0, help="Temperature of the soft labels.", above=0, panel=STUDENT)
    soft_weight: float | None = setting(
        None, help="Share of the soft labels in the loss; the labels have the rest.", at_least=0, at_most=1,
        shown="the better of 0.5 and 0.9 on validation, after short trainings", panel=STUDENT,
    )  # fmt: skip
    folds: int = setting(
        0, help="Parts of the labelled text; the soft labels of each come from a teacher fine-tuned without it. 0: from the teacher "
        "itself, which has seen their labels.", at_least=0, at_most=10, panel=TEACHER,
    )  # fmt: skip
    then: Ending = setting(
        "soft-labels", help="What follows a method that learns from plain text alone: training on the task by these.",
        panel=STUDENT,
    )  # fmt: skip
    start: str = setting(
        "spread",
        help="The student's first weights: layers of the teacher where they fit (spread, alternate, first or last), new ones (random), "
        "or the folder or Hub name of a checkpoint, such as a student of `distill`.",
        suggested=tuple(name for name in STARTS if name != "layer-map"), panel=STUDENT,
    )  # fmt: skip
    distill_tokens: int = setting(
        0, help="Tokens of plain text that a method on plain text reads.", at_least=0,
        shown=f"all of it once, at most {MOST_DISTILL_TOKENS:,}", panel=STUDENT,
    )  # fmt: skip
    teacher_layer: int = setting(
        0, help="The teacher layer whose relations are learned, from 1.", at_least=0,
        shown="the layer that the student's last one starts from, or the papers' choice", panel=STUDENT,
    )  # fmt: skip
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    """In recipes: settings of one stage, such as `[stages.minilmv2]` with `learning_rate`."""
    batch: int = setting(32, help="Texts per training step.", at_least=1, at_most=1_000_000, panel=MACHINE)
    accumulate: int = setting(1, help=ACCUMULATE, at_least=1, at_most=4096, panel=MACHINE)
    precision: TrainingPrecision = setting("auto", help=PRECISION, panel=MACHINE)
    device: TrainingDevice = setting("auto", help=DEVICE, panel=MACHINE)
    threads: int = setting(0, help=THREADS, at_least=0, at_most=4096, shown=ALL_CORES, panel=MACHINE)
    seed: int = setting(0, help=SEED, at_least=0, at_most=2**32 - 1, panel=MACHINE)
    trackers: tuple[str, ...] = setting((), help=TRACKER, choices=TRACKERS, flag="--tracker", panel=MACHINE)
    checkpoint_seconds: float = setting(
        30.0, help="Seconds between checkpoints: the most work that a kill loses.", at_least=0, panel=MACHINE
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class FineTuning(DataSet):
    """Settings of `finetune`."""

    model: str = setting(help="Transformers folder or Hub name, such as a student of `distill`.")
    task: str = setting(help="Task of the model.", choices=(*TASKS, GENERATION))
    data: str = setting(help=SPLITS)
    out: str = setting(metavar="FOLDER", help="The checkpoint to write.")
    revision: str = setting("", help=REVISION, shown="its main branch")
    teacher: str = setting(
        "", help="Model fine-tuned on the task, whose soft labels are learned too.", shown="none: labels alone"
    )
    teacher_labels: tuple[str, ...] = setting((), help=TEACHER_LABELS, metavar="FILE")
    unlabelled: tuple[str, ...] = setting((), help=UNLABELLED, metavar="FILE")
    schedule: str = setting(
        "",
        help="Training schedule of a paper (docs/reference/methods.md); flags override it.",
        choices=tuple(name for name, preset in PRESETS.items() if preset.use == "fine-tuning"),
    )
    epochs: float | None = setting(
        None,
        help="Most epochs over the labelled text.",
        above=0,
        at_most=1_000_000,
        shown=f"5, and at least {LEAST_TUNING_STEPS:,} steps",
    )
    patience: int = setting(
        2, help="Validations without a new best before training stops; 0 never stops it.", at_least=0
    )
    learning_rate: float | None = setting(None, help="Peak learning rate.", above=0, shown="0.0001")
    batch: int | None = setting(None, help="Texts per step.", at_least=1, at_most=1_000_000, shown="32")
    max_length: int = setting(0, help="Longest text in tokens.", at_least=0, shown="what the model takes, at most 512")
    student: str = setting(
        "", help=f"For {GENERATION}: shape of a student to train in place of --model, made of its parts. {SHAPES}",
        suggested=tuple(STUDENTS), metavar="SHAPE", shown="--model itself",
    )  # fmt: skip
    target_tokens: int = setting(
        0, help=f"Most tokens of a target of {GENERATION}; text and target together have --max-length.", at_least=0, shown="48",
    )  # fmt: skip
    target_column: str = setting(
        "", help=f"Column of the target of {GENERATION}.", shown="target", metavar="NAME", panel=COLUMNS
    )
    temperature: float | None = setting(None, help="Temperature of the soft labels.", above=0, shown="2")
    soft_weight: float | None = setting(
        None, help="Share of the soft labels in the loss; the labels have the rest.", at_least=0, at_most=1, shown="0.9"
    )
    language_temperature: float = setting(
        1.0, help="Evens out languages in training: 1 reads each text once an epoch, more reads those of small languages more often.",
        at_least=1, at_most=1000,
    )  # fmt: skip
    new_head: bool = setting(False, help="Fine-tune a new head even if the model already has one.")
    device: TrainingDevice = setting("auto", help=DEVICE)
    seed: int = setting(0, help=SEED, at_least=0, at_most=2**32 - 1)
    threads: int = setting(0, help=THREADS, at_least=0, at_most=4096, shown=ALL_CORES)
    precision: TrainingPrecision = setting("auto", help=PRECISION)
    accumulate: int = setting(1, help=ACCUMULATE, at_least=1, at_most=4096)
    trackers: tuple[str, ...] = setting((), help=TRACKER, choices=TRACKERS, flag="--tracker")

    def __post_init__(self) -> None:
        check(self)


def filled_in(settings: FineTuning) -> FineTuning:
    """`settings` with open values from the schedule, or the defaults.

    Raises:
        BadInput: an unknown schedule.
    """
    usual: dict[str, Any] = {"learning_rate": 1e-4, "batch": 32, "temperature": 2.0, "soft_weight": 0.9}
    if settings.schedule:
        preset = preset_of(settings.schedule, "fine-tuning")
        usual |= {"epochs": preset.epochs, "learning_rate": preset.learning_rate, "batch": preset.batch}
        settings = replace(settings, max_length=settings.max_length or preset.tokens)
    return replace(settings, **{name: value for name, value in usual.items() if getattr(settings, name) is None})


@dataclass(frozen=True, kw_only=True)
class Distillation(TextColumn):
    """Settings of `distill`."""

    teacher: str = setting(help="Transformers folder or Hub name.")
    revision: str = setting("", help=REVISION, shown="its main branch")
    corpus: tuple[str, ...] = setting(help=CORPUS, metavar="FILE")
    out: str = setting(metavar="FOLDER", help="The checkpoint to write.")
    student: str = setting("", help=SHAPES, suggested=tuple(STUDENTS), metavar="SHAPE", shown=OWN_SHAPE)
    method: TextMethod = setting("minilmv2", help="What is learned (docs/reference/methods.md).")
    schedule: str = setting(
        "",
        help="Training schedule of a paper (docs/reference/methods.md); flags override it.",
        choices=tuple(name for name, preset in PRESETS.items() if preset.use == "distillation"),
    )
    epochs: float | None = setting(
        None,
        help="Epochs over the corpus for all stages of the method together; each assistant trains for as many.",
        above=0,
        at_most=1_000_000,
        shown="1",
    )
    learning_rate: float = setting(0.0, help="Peak learning rate.", at_least=0, shown="that of each stage")
    batch: int | None = setting(
        None, help="Pieces of text, or packed rows, per step.", at_least=1, at_most=1_000_000, shown="32"
    )
    relation_heads: int = setting(
        0,
        help="Heads that queries, keys and values are split into.",
        at_least=0,
        shown="48, or the next below that fits",
    )
    teacher_layer: int = setting(
        0,
        help="Teacher layer to learn from, counted from 1.",
        at_least=0,
        shown="the layer that the student's last one starts from, or the papers' choice",
    )
    layer_map: str = setting(
        "", help="Which teacher layers each student layer learns from.", choices=LAYER_MAPS,
        shown="the method's own",
    )  # fmt: skip
    tokens: int | None = setting(None, help="Longest piece of text, in tokens.", at_least=8, shown="128")
    pack: bool = setting(
        True, help="Pack short pieces into rows of --tokens tokens, for methods that compare relations."
    )
    whole_words: bool = setting(False, help="Mask whole words, not tokens, if the method learns from masked text.")
    start: str = setting(
        "spread",
        help="The student's first weights: teacher layers if they fit (spread, alternate, first, last or layer-map), new ones "
        "(random), or the folder or Hub name of a checkpoint.",
        suggested=STARTS,
    )
    assistants: tuple[str, ...] = setting(
        (),
        help="Assistant to distil first, such as 12x384; the student learns from it. Several: in order. auto: MiniLM's rule.",
        flag="--assistant",
        metavar="SHAPE",
        suggested=("auto", *STUDENTS),
    )
    device: TrainingDevice = setting("auto", help=DEVICE)
    seed: int = setting(0, help=SEED, at_least=0, at_most=2**32 - 1)
    precision: TrainingPrecision = setting("auto", help=PRECISION)
    threads: int = setting(0, help=THREADS, at_least=0, at_most=4096, shown=ALL_CORES)
    accumulate: int = setting(1, help=ACCUMULATE, at_least=1, at_most=4096)
    trackers: tuple[str, ...] = setting((), help=TRACKER, choices=TRACKERS, flag="--tracker")
    teacher_cache: str = setting(
        "",
        help="Folder that caches the teacher's activations, 1 byte a number, for several epochs or students.",
        metavar="FOLDER",
        shown="none",
    )
    teacher_shard: bool = setting(
        False,
        help="Cut the teacher's layers over all processes, for one that does not fit a GPU (docs/many-machines.md).",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Labelling(TextColumns):
    """Settings of `label`."""

    checkpoint: str = setting(
        "", help="Model fine-tuned on the task, of any family that transformers has: a folder or Hub name.", shown="none",
        flag="--with", panel=ANSWERS,
    )  # fmt: skip
    command: str = setting(
        "", help="Command that reads texts as JSON lines and prints answers as JSON lines (docs/labelling.md).", shown="none",
        flag="--with-command", panel=ANSWERS,
    )  # fmt: skip
    url: str = setting(
        "", help="Endpoint of a language model, such as http://localhost:8080/v1, that has OpenAI's chat completions.", shown="none",
        flag="--with-url", panel=ANSWERS,
    )  # fmt: skip
    input: tuple[str, ...] = setting(
        help="File of texts: labelled rows, whose labels are not read, or .txt with one text a line.", metavar="FILE"
    )
    out: str = setting(metavar="FILE", help="JSON lines to write, one for each text.")
    task: str = setting("", help="Task of a command or an endpoint.", choices=TASKS, shown="that of the head of --with")
    label: tuple[str, ...] = setting(
        (), help="Name of a label; others are refused. An endpoint is told them.", shown="those of the head of --with; of a command any",
        metavar="NAME",
    )  # fmt: skip
    multi_label: bool = setting(False, help="Ask an endpoint for any number of labels a text.")
    model: str = setting(
        "", help="Name of a model that the endpoint serves.", shown="needed with --with-url", panel=ENDPOINT
    )
    prompt: str = setting(
        "", help="File of instructions for the model, with {labels} where their names are put.", metavar="FILE",
        shown="those of docs/labelling.md", panel=ENDPOINT,
    )  # fmt: skip
    key_variable: str = setting(
        "OPENAI_API_KEY", help="Environment variable that holds the endpoint's key.", metavar="NAME", panel=ENDPOINT
    )
    concurrency: int = setting(8, help="Requests that are under way at once.", at_least=1, at_most=256, panel=ENDPOINT)
    per_minute: float = setting(0.0, help="Most requests a minute.", at_least=0, shown="no limit", panel=ENDPOINT)
    retries: int = setting(
        5, help="Times that a failed request is sent again.", at_least=0, at_most=100, panel=ENDPOINT
    )
    prompt_price: float = setting(0.0, help="Price of a million tokens of prompts.", at_least=0, panel=ENDPOINT)
    completion_price: float = setting(0.0, help="Price of a million tokens of answers.", at_least=0, panel=ENDPOINT)
    timeout_s: float = setting(
        60.0, help="Seconds to wait for an answer of an endpoint or a command.", above=0, at_most=86_400, panel=ENDPOINT
    )
    revision: str = setting("", help=REVISION, shown="its main branch", panel=MODEL)
    max_length: int = setting(
        0, help="Longest text in tokens.", at_least=0, shown="what the model takes, at most 512", panel=MODEL
    )
    device: TrainingDevice = setting(
        "auto", help="Device of the model; auto is a GPU if torch finds one, otherwise the CPU.", panel=MODEL
    )
    threads: int = setting(0, help=THREADS, at_least=0, at_most=4096, shown=ALL_CORES, panel=MODEL)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Selecting(RowColumns):
    """Settings of `select`."""

    bank: tuple[str, ...] = setting(
        help="File of unlabelled texts to choose from: .txt with one text a line, or rows.", metavar="FILE"
    )
    like: str = setting(
        help="Folder with train, validation and test files, or a `datasets` name: what the texts should be like."
    )
    task: str = setting(help="Task of the data.", choices=TASKS)
    encoder: str = setting(help="Model whose sentence vectors tell what is alike: a transformers folder or Hub name.")
    out: str = setting(metavar="FILE", help="JSON lines to write, one for each chosen text.")
    k: int = setting(10, help="Nearest texts of the bank to choose for each text of train.", at_least=1, at_most=10_000)
    near_duplicate: float = setting(
        0.97, help="A text whose cosine with a text of the data or a nearer chosen one is above this is left out.",
        at_least=0, at_most=1,
    )  # fmt: skip
    uncertain: int = setting(
        0, help="Of the nearest texts, keep this many: those on which the model of --with is least sure.", at_least=0,
        at_most=10_000_000, shown="all of them",
    )  # fmt: skip
    checkpoint: str = setting(
        "", help="Model fine-tuned on the task, such as a student: a folder or Hub name.", shown="none", flag="--with"
    )
    encoder_revision: str = setting(
        "", help="Branch, tag or commit of an encoder of the Hub.", shown="its main branch", panel=MODELS
    )
    revision: str = setting(
        "", help="Branch, tag or commit of a model of the Hub in --with.", shown="its main branch", panel=MODELS
    )
    max_length: int = setting(
        0, help="Longest text in tokens.", at_least=0, shown="what the model takes, at most 512", panel=MODELS
    )
    device: TrainingDevice = setting(
        "auto", help="Device of the models; auto is a GPU if torch finds one, otherwise the CPU.", panel=MODELS
    )
    threads: int = setting(0, help=THREADS, at_least=0, at_most=4096, shown=ALL_CORES, panel=MODELS)

    def __post_init__(self) -> None:
        check(self)
