"""Opens and checks the inputs of a run. Nothing here trains or writes to the bundle."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from compress.data.columns import columns_of
from compress.data.examples import Example
from compress.data.splits import LEAST_CHOSEN_ON
from compress.data.texts import read_texts
from compress.models.pretrained import open_model
from compress.runs.data_checks import FurtherTexts, read_further
from compress.runs.open_task import open_task
from compress.runs.resumable_stages import Workdir
from compress.runs.task_inputs import TaskInputs
from export.graph.vocabulary_trimming import always_kept, check_padding, trimming_to
from export.packing.variants import Split, check_promises
from export.packing.writer import refuse_foreign
from export.settings import VariantSettings, read_promise
from export.validation.promises import NO_CONFIDENCE, PROMISE_FILE, SET_APART
from serve.errors import BadInput
from serve.files import output, path_beside
from serve.options import rule_faults
from serve.text.tokenizer import load_tokenizer
from stillroom.console import show
from stillroom.inputs.folders import check_outside
from stillroom.inputs.recipe import Recipe

USUAL_SHARE = 95  # percent of the texts of validation that the usual length of a timed text holds
LEAST_TOKENS = 8  # a text has special tokens too
TRIMMED = "vocabulary.json"  # in the folder of a student with a trimmed vocabulary


@dataclass
class RunInputs(TaskInputs):
    """The opened inputs of one run: those of its training, and the folder of its stages."""

    workdir: Workdir = field(kw_only=True)
    found: dict[str, Any] | None = field(default=None, kw_only=True)
    """The search that found the student, see `stillroom.student_search.search`; None for a named one, and for a bundle that is there."""
    auto: bool = field(default=False, kw_only=True)
    """Whether a search found the student."""
    promised_on: FurtherTexts | None = field(default=None, kw_only=True)
    """The texts of --promise-data, or those of validation that were set apart."""

    @property
    def recipe(self) -> Recipe:
        """All settings of the run."""
        return cast(Recipe, self.settings)

    @cached_property
    def asked_texts(self) -> list[Example]:
        """The texts that a teacher that can only be asked is asked about: those of all splits, and those that it alone labels."""
        splits = self.splits
        texts = [*splits.train, *splits.validation, *splits.test, *self.in_domain_texts]
        # Answers are matched by the text, so one that is marked in two ways is asked about once.
        by_text = {(text.text_read, text.text_pair or ""): text for text in reversed(texts)}
        return [replace(text, label=None, entities=None) for text in reversed(by_text.values())]

    def split(self, name: str) -> Split:
        """The texts of a split, those out of scope apart."""
        return Split(getattr(self.splits, name), getattr(self, name), self.out_of_scope(name))

    def promise_split(self) -> Split | None:
        """The texts that promises alone are made on, those out of scope apart; None where validation serves."""
        if not (found := self.promised_on):
            return None
        outside = self.encoded(found.outside) if found.outside else None
        of = PROMISE_FILE if self.recipe.promise_data else SET_APART
        return Split(found.examples, self.encoded(found.examples), outside, rests_on=of)

    @cached_property
    def kept_texts(self) -> list[str]:
        """The texts whose words a trimmed vocabulary keeps: those of --keep-words-of, and all that the student learns the task from."""
        examples = [*self.splits.train, *self.in_domain_texts]
        learned = [text for each in examples for text in (each.text_read, each.text_pair) if text]
        return _texts_of(self.recipe) + learned

    @cached_property
    def trimmed_inputs(self) -> "dict[Path, RunInputs]":
        """See `read_by`."""
        return {}

    def read_by(self, checkpoint: Path) -> "RunInputs":
        """These inputs, with texts tokenised by `checkpoint` where its vocabulary is trimmed."""
        if not (checkpoint / TRIMMED).is_file():
            return self
        if checkpoint not in self.trimmed_inputs:
            self.trimmed_inputs[checkpoint] = replace(
                self,
                tokenizer=load_tokenizer(checkpoint, self.max_length),
                tokens_of=open_model(str(checkpoint)),
                # Generated texts depend on the tokenizer, and are those that the teacher labels.
                further=self.in_domain_texts,
                labelled_as=self.soft_labelled if self.recipe.vocabulary_size else None,
            )
        return self.trimmed_inputs[checkpoint]


def _texts_of(recipe: Recipe) -> list[str]:
    columns = columns_of(recipe)
    return [text for file in recipe.keep_words_of for text in read_texts(Path(file), columns, pairs=True)]


def work_of(out: Path) -> Path:
    """The working folder of a run with this `out`."""
    return path_beside(out, ".work")


def prepare(recipe: Recipe, *, auto: bool = False) -> RunInputs:
    """Open and check everything that `recipe` names; nothing is written. `auto` tells that a search found the student.

    Raises:
        BadInput: every fault found, in one message.
    """
    out = Path(os.path.abspath(recipe.out))
    work = work_of(out)
    workdir = Workdir(work, show)

    def check_rules() -> None:
        if faults := rule_faults(recipe):
            raise BadInput(" ".join(faults))

    def check_out() -> None:
        refuse_foreign(output(recipe.out))

    checks: list[Callable[[], object]] = [
        check_rules,
        check_out,
        workdir.refuse_foreign,
        lambda: check_outside("--teacher", recipe.teacher, work) if recipe.teacher else None,
        lambda: check_outside("--start", recipe.start, work),
        lambda: _texts_of(recipe),
        *(partial(read_promise, promise) for promise in recipe.promises),
    ]
    apart = bool(recipe.promises) and not recipe.promise_data
    opened = open_task(recipe, out, more_checks=checks, notify=show, may_ask=True, sets_apart=apart)
    inputs = RunInputs(**{each.name: getattr(opened, each.name) for each in fields(opened)}, workdir=workdir, auto=auto)
    if recipe.budget_ms:
        timed_tokens(inputs, recipe.tokens)
    if recipe.promise_data:
        inputs.promised_on = read_further(
            "--promise-data", Path(recipe.promise_data), inputs.task, columns_of(recipe),
            [inputs.splits, *([inputs.outside] if inputs.outside else [])], inputs.labels, out_of_scope=recipe.out_of_scope,
            read_otherwise=[*inputs.unlabelled, *inputs.corpus, *(example.text for example in inputs.further)],
        )  # fmt: skip
        inputs.warnings.extend(inputs.promised_on.warnings("--promise-data"))
    elif recipe.promises and inputs.splits.held_out and inputs.splits.answered:
        raise BadInput(
            f"--promise {recipe.promises[0]} needs a validation file with labels: without one validation is the teacher's own answers, "
            "with which any student agrees. Give --promise-data, or --data a validation file, or leave the flag out."
        )
    elif inputs.splits.apart:
        inputs.promised_on = FurtherTexts([*inputs.splits.apart], [*inputs.outside.apart] if inputs.outside else [], 0)
    elif recipe.promises:
        inputs.warnings.append(
            f"--promise has {NO_CONFIDENCE}, since setting a quarter of validation apart would leave it fewer than {LEAST_CHOSEN_ON} "
            "texts. Give more texts of validation, or --promise-data."
        )
    wanted = VariantSettings(promises=recipe.promises, promise_confidence=recipe.promise_confidence)
    check_promises(wanted, inputs.promise_split() or inputs.split("validation"))
    if recipe.keep_words_of or recipe.vocabulary_size:
        check_vocabulary(inputs)
    return inputs


def check_vocabulary(inputs: RunInputs) -> None:
    """Check that the vocabulary can be trimmed as the recipe asks, which is told now and not after hours of training.

    Raises:
        BadInput: it cannot.
    """
    size = inputs.recipe.vocabulary_size
    if size and inputs.task.has_contexts:
        raise BadInput(
            f"--vocabulary-size {size} gives the student other tokens than its teacher, and --task {inputs.task.name} compares them "
            "token by token. Give --keep-words-of alone, which trims after the training."
        )
    if size and not inputs.begins_on_labels:
        raise BadInput(
            f"--vocabulary-size {size} gives the student other tokens than its teacher, and --method {inputs.chain.method} compares them "
            "token by token. Give --method soft-labels or labels, or --keep-words-of alone, which trims after the training."
        )
    named = f"{'--vocabulary-size' if size else '--keep-words-of'}: {inputs.opened.name}"
    document = json.loads(inputs.tokenizer.to_str())
    pad_id = inputs.train.pad_id
    if size:  # which tokens else are kept takes long to find, and does not decide these
        kept = sorted(always_kept(document, named, pad_id=pad_id, size=size))
        new_ids = {old: new for new, old in enumerate(kept)}
    else:
        new_ids = trimming_to(inputs.kept_texts, document, named, pad_id=pad_id).new_ids
    check_padding(inputs.opened.config, new_ids, named)


def timed_tokens(inputs: TaskInputs, asked: int) -> int:
    """The tokens `asked` for; for 0 the length that `USUAL_SHARE` percent of the texts of validation stay within.

    Raises:
        BadInput: they are too few for a text, or more than the model reads.
    """
    if not asked:
        usual = int(np.percentile([len(ids) for ids in inputs.validation.ids], USUAL_SHARE, method="higher"))
        return min(max(usual, LEAST_TOKENS), inputs.max_length)
    if not LEAST_TOKENS <= asked <= inputs.max_length:
        raise BadInput(
            f"--tokens {asked} is not from {LEAST_TOKENS} to {inputs.max_length}, the tokens of the longest text that is read. Give a "
            "length of your texts."
        )
    return asked
