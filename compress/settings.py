"""The settings of `distill`, `finetune` and the training part of `run`, each stated once (see `serve.options`). No torch."""

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args

from compress.data.examples import GENERATION
from compress.methods.presets import PRESETS, preset_of
from compress.models.shapes import FORM, LAYER_MAPS, STUDENTS, USUAL_STUDENT
from compress.training.metrics import TRACKERS
from serve.bundle.manifest import TaskName
from serve.options import Settings, again, setting

VECTORS = "feature-extraction"
LABELLED_TASKS = tuple(task for task in get_args(TaskName) if task != VECTORS)  # those that labels teach
# Methods that need plain text alone, in the order of docs/reference/methods.md; the last six are ablations.
TextMethod = Literal[
    "minilmv2", "minilm", "directminilm", "hidden-states", "output-distribution", "sentence-vectors", "tinybert-general",
    "distilbert", "mlm-kd", "mlm",
    "minilm-no-value-relation", "minilm-value-mse", "minilm-hidden-relation", "minilm-layer-to-layer",
    "directminilm-orthogonal", "directminilm-products",
]  # fmt: skip
TEXT_METHODS: tuple[str, ...] = get_args(TextMethod)
# Methods that need a task, or a task and plain text.
TASK_METHODS = (
    "soft-labels", "labels", "tinybert", "xtremedistil", "xtremedistil-printed", "xtremedistil-transfer", "xtremedistil-no-freezing",
    "xtremedistil-no-attention", "xtremedistil-last-layer",
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

COLUMNS = "Names in the data"

SHAPES = f"A name such as 3x384 (layers x width), or {FORM}; activation=relu may follow."
OWN_SHAPE = f"{USUAL_STUDENT}, or that of the checkpoint in --start"
ALL_CORES = "all that this process may use"
TAKEN = "what the model takes, at most 512 or what it was trained on here"
TEACHER_LABELS = (
    "File of a teacher's answers to texts (docs/labelling.md), learned as soft labels; texts that the data lacks are read too. "
    "`stillroom label` writes such files."
)
SPLITS = "Folder with train, validation and test files, or a `datasets` name."


@dataclass(frozen=True, kw_only=True)
class TextColumn(Settings):
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
class TaskData(DataSet):
    """A task and its labelled data."""

    task: str = setting(help="Task of the model.", choices=LABELLED_TASKS)
    data: str = setting(help=SPLITS)


@dataclass(frozen=True, kw_only=True)
class Output(Settings):
    """The folder that a verb writes."""

    out: str = setting(help="The checkpoint to write.", metavar="FOLDER")


@dataclass(frozen=True, kw_only=True)
class HubModel(Settings):
    """Which version of a model of the Hub is read."""

    revision: str = setting("", help="Branch, tag or commit of a Hub model.", shown="its main branch")


@dataclass(frozen=True, kw_only=True)
class Machine(Settings):
    """What a model in torch runs on."""

    device: TrainingDevice = setting(
        "auto", help="Device to train on; auto is a GPU if torch finds one, otherwise the CPU."
    )
    threads: int = setting(
        0, help="Threads of one model call: the cores to train on.", at_least=0, at_most=4096, shown=ALL_CORES
    )


@dataclass(frozen=True, kw_only=True)
class TrainingMachine(Machine):
    """What a training runs on."""

    precision: TrainingPrecision = setting(
        "auto",
        help="Precision of training; auto is bf16 on a GPU that has it and on a CPU with AMX, otherwise fp32; fp16 needs a GPU.",
    )


@dataclass(frozen=True, kw_only=True)
class Seed(Settings):
    """What random numbers start from."""

    seed: int = setting(0, help="Seed of all random numbers.", at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class Training(TrainingMachine, Seed):
    """How one training is carried out."""

    accumulate: int = setting(
        1, help="Parts that each batch is computed in, one after the other; more parts need less memory.",
        at_least=1, at_most=4096,
    )  # fmt: skip
    trackers: tuple[str, ...] = setting(
        (), help="Tracker that gets the metrics too; metrics.jsonl is always written.", choices=TRACKERS,
        flag="--tracker",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FineTunedTeacher(HubModel, TrainingMachine):
    """A teacher that is fine-tuned on a task first, for students to learn from."""

    teacher: str = setting(help="Transformers folder or Hub name of a BERT-like encoder.")
    max_length: int = setting(
        0,
        help="Longest text in tokens, up to what the model takes and 2,048. Memory grows with its square.",
        at_least=0,
        shown="what the teacher takes, at most 512 or what it was trained on here",
    )
    teacher_epochs: int | None = setting(
        None, help="Epochs of fine-tuning the teacher, at most.", at_least=1, at_most=1_000_000,
        shown=f"5, and at least {LEAST_TUNING_STEPS:,} steps",
    )  # fmt: skip
    teacher_learning_rate: float = setting(1e-4, help="Peak learning rate of fine-tuning the teacher.", above=0)
    batch: int = setting(32, help="Texts a step.", at_least=1, at_most=1_000_000)


@dataclass(frozen=True, kw_only=True)
class TaskSettings(FineTunedTeacher, Training, TaskData):
    """Settings for reading a task's data and training on it; `stillroom run` adds its own."""

    teacher: str = again(
        FineTunedTeacher, "teacher", "",
        help="Transformers folder or Hub name of a BERT-like encoder; with --start also of any other model with a head for the task, "
        "which is then asked for its answers.",
        shown="needed, unless --teacher-labels is given",
    )  # fmt: skip
    student: str = setting("", help=SHAPES, suggested=tuple(STUDENTS), metavar="SHAPE", shown=OWN_SHAPE)
    method: str = setting(
        AUTO,
        help="How the student learns (docs/reference/methods.md); minilm@12x384 goes by way of an assistant of that shape. auto "
        "takes soft-labels, or minilmv2 first where the layers are new and --corpus is given.",
        suggested=(AUTO, *TEXT_METHODS, *TASK_METHODS), metavar="NAME",
    )  # fmt: skip
    corpus: tuple[str, ...] = setting((), help="File of plain text, for methods that learn from it.", metavar="FILE")
    unlabelled: tuple[str, ...] = setting((), help="File of in-domain text that the teacher labels.", metavar="FILE")
    teacher_labels: tuple[str, ...] = setting(
        (), help=f"{TEACHER_LABELS} They take the place of --teacher; --start then names the encoder whose layers the student gets.",
        metavar="FILE",
    )  # fmt: skip
    augment: int = setting(
        0, help="Texts generated from each labelled one, for the teacher to label.", at_least=0, at_most=1000
    )
    out_of_scope: str = setting(
        "", help="Label of texts that fit no class; the model abstains below a threshold chosen on them."
    )
    language_temperature: float = setting(
        1.0, help="Evens out languages in training: 1 reads each text once an epoch, more reads those of small languages more often.",
        at_least=1, at_most=1000,
    )  # fmt: skip
    class_weights: bool = setting(
        False,
        help="Weigh the classes alike in the loss on labels, however many texts each has; for texts with one class.",
    )
    new_head: bool = setting(False, help="Fine-tune a new head even if the teacher already has one.")
    teacher_epochs: int | None = again(
        FineTunedTeacher, "teacher_epochs",
        help="Epochs of fine-tuning the teacher, at most; it stops when validation stops improving.",
    )  # fmt: skip
    teacher_patience: int = setting(
        2, help="Validations in the last third of training without a new best before it stops.", at_least=1
    )
    student_epochs: int | None = setting(
        None, help="Epochs over the labelled text, in steps: unlabelled and generated text adds variety, not time.",
        at_least=1, at_most=1_000_000, shown=f"10, and at least {LEAST_STEPS:,} steps",
    )  # fmt: skip
    student_learning_rate: float = setting(4e-4, help="Peak learning rate of training the student.", above=0)
    temperature: float = setting(2.0, help="Temperature of the soft labels.", above=0)
    soft_weight: float | None = setting(
        None, help="Share of the soft labels in the loss of a labelled text; its label has the rest.", at_least=0, at_most=1,
        shown="0.9 with unlabelled text, else the better of 0.5 and 0.9 on validation, after short trainings",
    )  # fmt: skip
    folds: int = setting(
        0, help="Parts of the labelled text; the soft labels of each come from a teacher fine-tuned without it. 0: from the teacher "
        "itself, which has seen their labels.", at_least=0, at_most=10,
    )  # fmt: skip
    then: Ending = setting(
        "soft-labels", help="What follows a method that learns from plain text alone: training on the task by these."
    )
    start: str = setting(
        "spread",
        help="The student's first weights: layers of the teacher where they fit (spread, alternate, first or last), new ones (random), "
        "or the folder or Hub name of a checkpoint, such as a student of `distill`.",
        suggested=tuple(name for name in STARTS if name != "layer-map"),
    )  # fmt: skip
    distill_tokens: int = setting(
        0, help="Tokens of plain text that a method on plain text reads.", at_least=0,
        shown=f"all of it once, at most {MOST_DISTILL_TOKENS:,}",
    )  # fmt: skip
    teacher_layer: int = setting(
        0, help="The teacher layer whose relations are learned, from 1.", at_least=0,
        shown="the layer that the student's last one starts from, or the papers' choice",
    )  # fmt: skip
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    """In recipes: settings of one stage, such as `[stages.minilmv2]` with `learning_rate`."""
    batch: int = again(FineTunedTeacher, "batch", help="Texts per training step.")
    checkpoint_seconds: float = setting(
        30.0, help="Seconds between checkpoints: the most work that a kill loses.", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class FineTuning(HubModel, Training, TaskData):
    """Settings of `finetune`."""

    model: str = setting(help="Transformers folder or Hub name, such as a student of `distill`.")
    task: str = again(TaskData, "task", choices=(*LABELLED_TASKS, GENERATION))
    out: str = again(Output, "out")
    teacher: str = setting(
        "", help="Model fine-tuned on the task, whose soft labels are learned too.", shown="none: labels alone"
    )
    teacher_labels: tuple[str, ...] = again(TaskSettings, "teacher_labels", help=TEACHER_LABELS, excludes="teacher")
    unlabelled: tuple[str, ...] = again(TaskSettings, "unlabelled", needs="teacher")
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
    patience: int = again(
        TaskSettings, "teacher_patience", at_least=0,
        help="Validations in the last third of training without a new best before it stops; 0 never stops it.",
    )  # fmt: skip
    learning_rate: float | None = setting(None, help="Peak learning rate.", above=0, shown="0.0001")
    batch: int | None = again(FineTunedTeacher, "batch", None, help="Texts per step.", shown="32")
    max_length: int = again(FineTunedTeacher, "max_length", shown=TAKEN)
    student: str = again(
        TaskSettings, "student", shown="--model itself",
        help=f"For {GENERATION}: shape of a student to train in place of --model, made of its parts. {SHAPES}",
    )  # fmt: skip
    target_tokens: int = setting(
        0, help=f"Most tokens of a target of {GENERATION}; text and target together have --max-length.", at_least=0, shown="48",
    )  # fmt: skip
    target_column: str = setting(
        "", help=f"Column of the target of {GENERATION}.", shown="target", metavar="NAME", panel=COLUMNS
    )
    temperature: float | None = again(TaskSettings, "temperature", None, shown="2", needs="teacher|teacher_labels")
    soft_weight: float | None = again(TaskSettings, "soft_weight", shown="0.9", needs="teacher|teacher_labels")
    language_temperature: float = again(TaskSettings, "language_temperature")
    class_weights: bool = again(TaskSettings, "class_weights")
    new_head: bool = again(TaskSettings, "new_head", help="Fine-tune a new head even if the model already has one.")
    layout: ClassVar = {
        "Options": "model task data out revision teacher teacher_labels unlabelled schedule epochs patience learning_rate batch "
        "max_length student target_tokens temperature soft_weight language_temperature class_weights new_head device seed threads "
        "precision accumulate trackers"
    }


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
class Distillation(HubModel, Training, Output, TextColumn):
    """Settings of `distill`."""

    teacher: str = again(FineTunedTeacher, "teacher", help="Transformers folder or Hub name.")
    corpus: tuple[str, ...] = again(TaskSettings, "corpus", MISSING, help="File of plain text, one document a line.")
    student: str = again(TaskSettings, "student")
    method: TextMethod = setting("minilmv2", help="What is learned (docs/reference/methods.md).")
    schedule: str = again(
        FineTuning, "schedule", choices=tuple(name for name, preset in PRESETS.items() if preset.use == "distillation")
    )
    epochs: float | None = again(
        FineTuning, "epochs", shown="1",
        help="Epochs over the corpus for all stages of the method together; each assistant trains for as many.",
    )  # fmt: skip
    learning_rate: float = setting(0.0, help="Peak learning rate.", at_least=0, shown="that of each stage")
    batch: int | None = again(FineTuning, "batch", help="Pieces of text, or packed rows, per step.")
    relation_heads: int = setting(
        0,
        help="Heads that queries, keys and values are split into.",
        at_least=0,
        shown="48, or the next below that fits",
    )
    teacher_layer: int = again(TaskSettings, "teacher_layer", help="Teacher layer to learn from, counted from 1.")
    layer_map: str = setting(
        "", help="Which teacher layers each student layer learns from.", choices=LAYER_MAPS,
        shown="the method's own",
    )  # fmt: skip
    tokens: int | None = setting(None, help="Longest piece of text, in tokens.", at_least=8, shown="128")
    pack: bool = setting(
        True, help="Pack short pieces into rows of --tokens tokens, for methods that compare relations."
    )
    whole_words: bool = setting(False, help="Mask whole words, not tokens, if the method learns from masked text.")
    start: str = again(
        TaskSettings,
        "start",
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
    layout: ClassVar = {
        "Options": "teacher revision corpus out student method schedule epochs learning_rate batch relation_heads teacher_layer "
        "layer_map tokens pack whole_words start assistants device seed precision threads accumulate trackers teacher_cache "
        "teacher_shard"
    }


@dataclass(frozen=True, kw_only=True)
class Labelling(HubModel, Machine, TextColumns):
    """Settings of `label`."""

    checkpoint: str = setting(
        "", help="Model fine-tuned on the task, of any family that transformers has: a folder or Hub name.", shown="none",
        flag="--with", excludes="task label",
    )  # fmt: skip
    command: str = setting(
        "", help="Command that reads texts as JSON lines and prints answers as JSON lines (docs/labelling.md).", shown="none",
        flag="--with-command",
    )  # fmt: skip
    url: str = setting(
        "", help="Endpoint of a language model, such as http://localhost:8080/v1, that has OpenAI's chat completions.", shown="none",
        flag="--with-url",
    )  # fmt: skip
    input: tuple[str, ...] = setting(
        help="File of texts: labelled rows, whose labels are not read, or .txt with one text a line.", metavar="FILE"
    )
    out: str = again(Output, "out", metavar="FILE", help="JSON lines to write, one for each text.")
    task: str = again(
        TaskData, "task", "", help="Task of a command or an endpoint.", shown="that of the head of --with"
    )
    label: tuple[str, ...] = setting(
        (), help="Name of a label; others are refused. An endpoint is told them.", shown="those of the head of --with; of a command any",
        metavar="NAME",
    )  # fmt: skip
    multi_label: bool = setting(False, help="Ask an endpoint for any number of labels a text.")
    model: str = setting("", help="Name of a model that the endpoint serves.", shown="needed with --with-url")
    prompt: str = setting(
        "", help="File of instructions for the model, with {labels} where their names are put.", metavar="FILE",
        shown="those of docs/labelling.md",
    )  # fmt: skip
    key_variable: str = setting(
        "OPENAI_API_KEY", help="Environment variable that holds the endpoint's key.", metavar="NAME"
    )
    concurrency: int = setting(8, help="Requests that are under way at once.", at_least=1, at_most=256)
    per_minute: float = setting(0.0, help="Most requests a minute.", at_least=0, shown="no limit")
    retries: int = setting(5, help="Times that a failed request is sent again.", at_least=0, at_most=100)
    prompt_price: float = setting(0.0, help="Price of a million tokens of prompts.", at_least=0)
    completion_price: float = setting(0.0, help="Price of a million tokens of answers.", at_least=0)
    timeout_s: float = setting(
        60.0, help="Seconds to wait for an answer of an endpoint or a command.", above=0, at_most=86_400
    )
    max_unanswered: float = setting(
        0.05, help="Largest share of texts without an answer; with more the exit code is 3.", at_least=0, at_most=1
    )
    max_length: int = again(FineTunedTeacher, "max_length", shown=TAKEN)
    device: TrainingDevice = again(
        Machine, "device", help="Device of the model; auto is a GPU if torch finds one, otherwise the CPU."
    )
    layout: ClassVar = {
        "What answers: one of": "checkpoint command url",
        "Options": "input out task label multi_label",
        "An endpoint or a command": "model prompt key_variable concurrency per_minute retries prompt_price completion_price timeout_s "
        "max_unanswered",
        "The model of --with": "revision max_length device threads",
    }


@dataclass(frozen=True, kw_only=True)
class Selecting(HubModel, Machine, RowColumns):
    """Settings of `select`."""

    bank: tuple[str, ...] = setting(
        help="File of unlabelled texts to choose from: .txt with one text a line, or rows.", metavar="FILE"
    )
    like: str = setting(
        help="Folder with train, validation and test files, or a `datasets` name: what the texts should be like."
    )
    task: str = again(TaskData, "task", help="Task of the data.")
    encoder: str = setting(help="Model whose sentence vectors tell what is alike: a transformers folder or Hub name.")
    out: str = again(Labelling, "out", help="JSON lines to write, one for each chosen text.")
    k: int = setting(10, help="Nearest texts of the bank to choose for each text of train.", at_least=1, at_most=10_000)
    near_duplicate: float = setting(
        0.97, help="A text whose cosine with a text of the data or a nearer chosen one is above this is left out.",
        at_least=0, at_most=1,
    )  # fmt: skip
    uncertain: int = setting(
        0, help="Of the nearest texts, keep this many: those on which the model of --with is least sure.", at_least=0,
        at_most=10_000_000, shown="all of them", needs="checkpoint",
    )  # fmt: skip
    checkpoint: str = again(
        Labelling,
        "checkpoint",
        help="Model fine-tuned on the task, such as a student: a folder or Hub name.",
        needs="uncertain",
        excludes="",
    )
    encoder_revision: str = again(HubModel, "revision", help="Branch, tag or commit of an encoder of the Hub.")
    revision: str = again(HubModel, "revision", help="Branch, tag or commit of a model of the Hub in --with.")
    max_length: int = again(Labelling, "max_length")
    device: TrainingDevice = again(
        Machine, "device", help="Device of the models; auto is a GPU if torch finds one, otherwise the CPU."
    )
    layout: ClassVar = {
        "Options": "bank like task encoder out k near_duplicate uncertain checkpoint",
        "The models": "encoder_revision revision max_length device threads",
    }
