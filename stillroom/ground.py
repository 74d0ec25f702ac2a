"""What a run stands on: the recipe's inputs, opened and checked. Nothing here trains or writes to the bundle."""

import dataclasses
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer

from compress import processes
from compress.augment import augmented
from compress.examples import Example, Splits, check_task, fingerprint, read_splits, read_texts
from compress.faults import Faults
from compress.initialise import layers_fit
from compress.methods import Sizes, usual_relation_heads, usual_teacher_layer
from compress.out_of_scope import refuse_in_scope, set_apart
from compress.precision import check_precision
from compress.preflight import counted, labels_for, warnings_of
from compress.relations import check_relation_heads
from compress.scores import metric_name
from compress.students import Shape, shape_of
from compress.tasks import Encoded, encode
from compress.teacher import Opened, open_model, open_tokenizer, with_markers
from compress.trackers import check_trackers
from export.pack import refuse_foreign
from serve.bundle import sha256_file
from serve.cpu import cpu_features
from serve.errors import BadInput
from serve.markers import MARKERS, has_markers
from serve.threads import available_cores
from stillroom.recipe import Recipe
from stillroom.stages import Work

# Float32 copies of the teacher's weights that a run keeps at most: checkpoints with two moments each, stages, graphs.
DISK_COPIES = 12


@dataclass
class Ground:
    """The opened inputs of one run."""

    recipe: Recipe
    opened: Opened
    splits: Splits
    outside: Splits | None
    """Texts out of scope, which are in none of `splits`."""
    shape: Shape
    labels: tuple[str, ...]
    teacher_has_head: bool
    tokenizer: Tokenizer
    max_length: int
    corpus: list[str]
    unlabelled: list[str]
    warnings: list[str]
    work: Work
    teacher_mark: str

    @cached_property
    def train(self) -> Encoded:
        """The train split, tokenised."""
        return self._encoded(self.splits.train)

    @cached_property
    def validation(self) -> Encoded:
        """The validation split, tokenised."""
        return self._encoded(self.splits.validation)

    @cached_property
    def test(self) -> Encoded:
        """The test split, tokenised."""
        return self._encoded(self.splits.test)

    @cached_property
    def in_domain(self) -> Encoded | None:
        """The texts that only the teacher labels, tokenised: given and generated ones; None when there are none."""
        made = augmented(self.splits.train, self.tokenizer, self.recipe.augment, self.recipe.seed)
        texts = [Example(text) for text in self.unlabelled] + unseen(made, self.splits)
        return self._encoded(texts) if texts else None

    @cached_property
    def soft_labelled(self) -> Encoded:
        """All texts that get the teacher's soft labels, in their order: train, then `in_domain`."""
        return self.train if self.in_domain is None else self.train + self.in_domain

    def out_of_scope(self, split: str) -> Encoded | None:
        """The texts of `split` that are out of scope, tokenised; None when there are none."""
        texts = getattr(self.outside, split) if self.outside else []
        return self._encoded(texts) if texts else None

    def _encoded(self, examples: list[Example]) -> Encoded:
        return encode(
            examples, self.tokenizer, check_task(self.recipe.task), self.labels, multi_label=self.splits.multi_label
        )

    @property
    def metric(self) -> str:
        """The name of the task's metric."""
        return metric_name(check_task(self.recipe.task), multi_label=self.splits.multi_label)

    @property
    def relation_heads(self) -> int:
        """As the recipe says, or the usual number for these widths."""
        return self.recipe.relation_heads or usual_relation_heads(self.opened.config.hidden_size, self.shape.hidden)

    @property
    def relation_layer(self) -> int:
        """As the recipe says, or the usual one for this depth."""
        config, shape = self.opened.config, self.shape
        sizes = Sizes(config.num_hidden_layers, shape.layers, config.hidden_size, shape.hidden)
        return self.recipe.relation_layer or usual_teacher_layer(sizes)

    @property
    def data_mark(self) -> str:
        """What the examples are, whatever files they came in."""
        return self.splits.fingerprint


def on_this_machine(recipe: Recipe) -> Recipe:
    """`recipe` with what it leaves to the machine spelled out: the cores to train on, and the precision."""
    precision = recipe.precision
    if precision == "auto":
        precision = "bf16" if has_bf16() else "fp32"
    return dataclasses.replace(recipe, threads=recipe.threads or available_cores(), precision=precision)


def has_bf16() -> bool:
    """Whether matrix products in bfloat16 run natively here; elsewhere they are emulated, and slower than float32."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    return bool({"amx_bf16", "avx512_bf16"} & cpu_features())


def device_here() -> torch.device:
    """Where models are trained and label texts."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def trained_with() -> list[str]:
    """The versions and the device that decide what training and tokenising give, for fingerprints."""
    return [*(version(name) for name in ("torch", "transformers", "tokenizers")), device_here().type]


def same_bits(threads: int) -> None:
    """Torch on so many cores, shared with the other processes here, by ways that give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products on CUDA ask for
    torch.set_num_threads(max(1, threads // processes.count_here()))
    torch.use_deterministic_algorithms(True)


def work_of(out: Path) -> Path:
    """The folder that a run to `out` works in."""
    return out.with_name(f"{out.name}.work")


def prepare(recipe: Recipe, *, role: str = "--teacher") -> Ground:
    """Open and check everything that `recipe` names; nothing is written. `role` is the flag that its teacher was given by.

    Raises:
        BadInput: every fault found, in one message.
    """
    recipe = on_this_machine(recipe)
    faults = Faults()
    task = faults.check(lambda: check_task(recipe.task))
    shape = faults.check(lambda: shape_of(recipe.student))
    opened = faults.check(lambda: open_model(recipe.teacher, role=role))
    out = Path(os.path.abspath(recipe.out))
    work = Work(work_of(out))
    faults.check(lambda: check_out(out))
    faults.check(lambda: check_precision(recipe.precision, device_here()))
    faults.check(lambda: check_trackers(recipe.trackers))
    faults.check(work.refuse_foreign)
    splits = faults.check(lambda: read_splits(recipe.data, task, seed=recipe.seed)) if task else None
    outside = None
    if splits and recipe.out_of_scope:
        apart = faults.check(partial(set_apart, splits, recipe.out_of_scope))
        splits, outside = apart or (None, None)
    corpus = _texts(faults, recipe.corpus)
    unlabelled = _texts(faults, recipe.unlabelled)
    labelled = tokenizer = None
    if opened and splits and splits.relations:
        opened = faults.check(partial(with_markers, opened))
        faults.check(partial(check_marked, unlabelled))
    if opened and splits and task:
        labelled = faults.check(lambda: labels_for(opened, splits, task, new_head=recipe.new_head))
    if labelled:
        faults.check(partial(refuse_in_scope, recipe.out_of_scope, labelled[0], f"{role} {recipe.teacher}"))
    if opened:
        faults.check(lambda: check_disk(out, opened))
        faults.check(lambda: check_relations(recipe, opened, shape))
        faults.check(lambda: usable_length(recipe.max_length, opened))
        tokenizer = faults.check(lambda: open_tokenizer(opened))
        if opened.folder.resolve().is_relative_to(work.root.resolve()):
            faults.messages.append(
                f"{role} {recipe.teacher} lies in {work.root}, which this run would clear. Copy it elsewhere."
            )
    faults.raise_if_any()
    assert task and shape and opened and splits and labelled and tokenizer  # noqa: PT018 - no test
    max_length = usable_length(recipe.max_length, opened)
    tokenizer.enable_truncation(max_length=max_length)
    warnings = warnings_of(splits, tokenizer, task, max_length)
    corpus = _unseen_texts(corpus, splits, "corpus", warnings)
    unlabelled = _unseen_texts(unlabelled, splits, "unlabelled", warnings)
    if not layers_fit(opened.config, shape):
        warnings.append(
            f"The student's layers start at random: {shape} has another width or number of heads than the teacher "
            f"({opened.config.hidden_size}, {opened.config.num_attention_heads}), or more layers. It needs far more training than one "
            "that starts from the teacher's layers."
        )
    mark = folder_mark(opened.folder)
    return Ground(
        recipe,
        opened,
        splits,
        outside,
        shape,
        *labelled,
        tokenizer,
        max_length,
        corpus,
        unlabelled,
        warnings,
        work,
        teacher_mark=mark,
    )


def check_relations(recipe: Recipe, opened: Opened, shape: Shape | None) -> None:
    """Nothing, when the relation stage's layer and heads fit the teacher and the student.

    Raises:
        BadInput: they do not.
    """
    depth = opened.config.num_hidden_layers
    if recipe.relation_layer > depth:
        raise BadInput(f"`relation_layer` is {recipe.relation_layer}; the teacher has layers 1 to {depth}.")
    if shape and recipe.relation_heads:
        check_relation_heads(recipe.relation_heads, opened.config.hidden_size, shape.hidden)


def check_marked(unlabelled: Sequence[str]) -> None:
    """Nothing, when each of the texts that a teacher of relations shall label has its head and tail marked.

    Raises:
        BadInput: one has not.
    """
    bare = [text for text in unlabelled if not has_markers(text)]
    if bare:
        raise BadInput(
            f"{len(bare)} of {len(unlabelled)} texts of --unlabelled lack {', '.join(MARKERS)} round head and tail, and the data has "
            f"relations between these; the first is {bare[0][:80]!r}. Put the markers into the texts."
        )


def unseen(examples: list[Example], splits: Splits) -> list[Example]:
    """`examples` without those whose text stands in validation or test, which no training may see."""
    held = {
        text.strip() for example in (*splits.validation, *splits.test) for text in (example.text, example.text_read)
    }
    return [example for example in examples if example.text.strip() not in held]


def _unseen_texts(texts: list[str], splits: Splits, what: str, warnings: list[str]) -> list[str]:
    """The unseen ones of the texts given as --`what`; `warnings` tells of the others."""
    kept = [example.text for example in unseen([Example(text) for text in texts], splits)]
    if len(kept) < len(texts):
        where = "in validation or test;"
        one, several = f"text of --{what} stands {where} it was", f"texts of --{what} stand {where} they were"
        warnings.append(f"{counted(len(texts) - len(kept), one, several)} left out.")
    return kept


def _texts(faults: Faults, paths: Sequence[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        found += faults.check(partial(read_texts, Path(path))) or []
    return found


def texts_mark(texts: Iterable[str]) -> str:
    """What `texts` are, as one name."""
    return fingerprint(Example(text) for text in texts)


def check_out(out: Path) -> None:
    """Nothing, when `out` is free or a bundle.

    Raises:
        BadInput: it is a file, or a folder that holds something else.
    """
    refuse_foreign(out)
    there = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    if not there.is_dir():
        raise BadInput(f"--out {out} cannot be made: {there} is not a folder. Give another place.")
    if not os.access(there, os.W_OK):
        raise BadInput(f"--out {out} cannot be made: {there} is not yours to write in. Give another place.")


def check_disk(out: Path, opened: Opened) -> None:
    """Nothing, when there is room for what a run writes.

    Raises:
        BadInput: too little is free.
    """
    needed = DISK_COPIES * sum(file.stat().st_size for file in opened.folder.glob("*.safetensors"))
    parent = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise BadInput(
            f"--out {out}: {free / 1e9:.1f} GB are free there and about {needed / 1e9:.1f} GB are needed. Free some, or give another place."
        )


def usable_length(asked: int, opened: Opened) -> int:
    """The longest text in tokens: as asked, or all that the teacher takes.

    Raises:
        BadInput: longer than the teacher's position table, or too short to hold a word.
    """
    if asked and not 8 <= asked <= opened.max_length:
        raise BadInput(f"--max-length is {asked}; {opened.name} takes 8 to {opened.max_length} tokens.")
    return asked or opened.max_length


def folder_mark(folder: Path) -> str:
    """The content of a model folder, as one name."""
    files = sorted(
        f for f in folder.iterdir() if f.suffix in (".safetensors", ".json", ".txt", ".model") and f.is_file()
    )
    return ":".join(sha256_file(file) for file in files)
