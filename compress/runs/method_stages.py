"""A method as stages of a run, from a teacher over assistants (if any) to a student."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from compress.models import task_heads
from compress.models.initialise import RANDOM, is_checkpoint, student_from, student_of
from compress.models.pretrained import Opened, load, load_encoder, open_model
from compress.runs.method_chain import Link, asks_words, layers_named
from compress.runs.method_trainings import MethodInputs, fit_head, save, train
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import RunStage, run_stages

START, HEAD = "start", "teacher-head"  # what the folders of stages that do not train a student end with


def run_method(
    workdir: Workdir, run_fingerprint: str, links: Sequence[Link], given: MethodInputs, words: Path | None = None
) -> list[Path]:
    """The folders of the `method_stages` that train, in order; the last holds the student. `run_fingerprint` covers all inputs."""
    folders: dict[str, Path] = {}
    run_stages(workdir, method_stages(links, lambda: (links, given), (run_fingerprint,), folders, words=words), folders)
    return [folder for name, folder in folders.items() if not name.endswith((START, HEAD))]


def method_stages(
    links: Sequence[Link],
    ready: Callable[[], tuple[Sequence[Link], MethodInputs]],
    made_of: tuple[object, ...],
    folders: Mapping[str, Path],
    prefix: str = "",
    *,
    words: Path | None = None,
) -> list[RunStage]:
    """The stages of a method: of each student its start and its trainings; the last makes the student.

    The first assistant learns from the teacher; each next student learns from the assistant before it. If the teacher is asked for masked
    words, and no `words` give it a head for them, a stage fits one.

    Args:
        links: the students and their trainings; the tokens of each training may be others when its turn comes.
        ready: called then; gives the links with the tokens to read, and the inputs.
        made_of: covers all inputs.
        folders: gets the finished stages.
        prefix: what the names of the folders begin with.
        words: the teacher with such a head, if it was fitted before.
    """
    taught_by = {HEAD: words} if words else {}
    found: list[RunStage] = []

    def add(name: str, of: tuple[object, ...], make: Callable[[Path], None]) -> str:
        found.append(RunStage(name, (*made_of, *of), make))
        return name

    def teacher(name: str, given: MethodInputs) -> Path | Opened:
        """What the stage `name` left; the given teacher if it is empty."""
        return (taught_by.get(name) or folders[name]) if name else given.opened

    def begin(folder: Path, number: int, source: str) -> None:
        after, given = ready()
        _begin(folder, given, after[number], teacher(source, given), last=number == len(links) - 1)

    def learn(folder: Path, number: int, step: int, before: str, source: str) -> None:
        after, given = ready()
        train(folder, given, after[number], step, folders[before], teacher(source, given))

    source = head = ""  # the stages whose models teach: by activations, and by masked words
    if words:
        head = HEAD
    elif any(asks_words(link.stages) for link in links):
        head = add(f"{prefix}{HEAD}", ("head",), lambda folder: fit_head(folder, ready()[1]))
    for number, link in enumerate(links):
        name = prefix + ("" if number == len(links) - 1 else f"assistant-{number + 1}-")
        begins = head if asks_words(link.stages) else source
        before = add(f"{name}{START}", (name, "start"), partial(begin, number=number, source=begins))
        for step, stage in enumerate(link.stages, 1):
            asked = head if stage.objective.masks_tokens and stage.objective.asks_teacher else source
            make = partial(learn, number=number, step=step, before=before, source=asked)
            before = add(f"{name}{step}-{stage.name}", (name, "stage", step), make)
        source = head = before
    return found


def _begin(folder: Path, given: MethodInputs, link: Link, source: Path | Opened, *, last: bool) -> None:
    """Save the student before training, of the class that its first stage needs, from parts of the model in `source`."""
    if last and is_checkpoint(given.start):
        student, origin = student_from(given.start, given.opened, seed=given.settings.seed, vocabulary=link.masks)
    else:
        if link.starts_from == "corpus":
            model = load_encoder(source, seed=given.settings.seed, vocabulary=link.masks)
        else:
            labelled = given.labelled[link.starts_from]
            model = load(open_model(str(labelled.teacher)), labelled.task)
        student, origin = student_of(
            model, link.shape, seed=given.settings.seed,
            chosen=layers_named(given.start, model.config, link.shape, given.layer_map), new_layers=given.start == RANDOM,
        )  # fmt: skip
        if link.starts_from != "corpus" and origin["head"] == "new":
            task_heads.start_head(student, given.labelled[link.starts_from].train)
    save(student, folder, given, {"role": "start", "student": str(link.shape), "origin": origin})
