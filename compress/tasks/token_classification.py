"""Entities: each word has a tag, and words in a row make an entity."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from compress.data.align_labels import align_labels, words_of_entities
from compress.data.answer_rows import HALF, Answer, probability_in, word_answer
from compress.data.columns import Columns
from compress.data.encoded import IGNORED, Encoded, encoded_rows, entities_at
from compress.data.examples import Example, Splits
from compress.data.label_checks import prefix_warnings, spelling_warnings
from compress.data.row_fields import text_of
from compress.data.rows import entities_and_items
from compress.data.tags import from_tags, tags_fault
from compress.data.task import Task
from compress.data.teacher_labels import word_logits
from compress.evaluation.metrics import ENTITY_F1, Prediction, scored_spans, widened
from compress.models.heads import TOKENS
from compress.tasks.labels import certain, entities_in, name_faults, written
from serve.errors import BadInput
from serve.text.answers import softmax
from serve.text.labels import bio_tags, entity_labels, split_tag, with_prefixes
from serve.text.spans import Word, words
from serve.wording import counted

INSTRUCTIONS = """You find entities in texts. Their labels are:
{labels}

Answer with one JSON object and nothing else: {"entities": [{"text": "...", "label": "..."}]}, with the entities in the order in which
they stand in the text, each copied from it exactly, letter by letter. If there is none, the list is empty."""


@dataclass(frozen=True)
class TokenClassification(Task):
    """Finds entities; a row of logits is the first token of a word."""

    name = "token-classification"
    columns = ("text", "entities", "tokens", "tags")
    metric = ENTITY_F1
    head = TOKENS
    labels_words = True
    table_fault = "is a table, whose cells cannot hold tags or entities; save it as JSON lines, parquet or .conll"
    answer_fields = "entities or words"

    def needed_columns(self, columns: Columns, names: Container[str]) -> list[str]:
        """The text with its entities, or words with their tags."""
        of_words = columns.tokens in names or columns.tags_in(names)
        if columns.entities in names or columns.has_spans(names) or not of_words:
            return ["text", "entities"]
        return ["tokens", "tags"]

    def example_of(self, row: dict[str, Any], columns: Columns) -> Example:
        """The text of a row with its entities, or its words with their tags."""
        name = columns.entities_in(row)
        if name is None:
            tags = columns.tags_in(row)
            if columns.tokens in row and tags is not None:
                return from_tags(row[columns.tokens], row[tags], (columns.tokens, tags))
        if columns.text not in row or name is None:
            raise ValueError(columns.fault_of_row(row, self))
        text = text_of(row, columns.text)
        # Prodigy writes no `spans` where a text has none, and a table of its rows null.
        given = [] if row.get(name) is None and (name == "spans" or name not in row) else row[name]
        found = entities_and_items(given, text, name)
        return Example(text, entities=tuple(entity for entity, _ in found))

    def teacher_answer(self, row: dict[str, Any], example: Example, columns: Columns) -> Answer | None:
        """The answer in the fields `words` or `entities`."""
        if row.get("words") is not None:
            return word_answer(row["words"], example)
        given = row.get(columns.entities)
        if given is None:
            return None
        spans = tuple(
            (
                entity,
                1.0 if item.get("score") is None else probability_in(item["score"], f"the score of {entity.label}"),
            )
            for entity, item in entities_and_items(given, example.text, columns.entities)
        )
        likely = tuple(entity for entity, score in spans if score >= HALF)
        return Answer(Example(example.text, entities=likely), spans=spans)

    def teacher_logits(self, answer: Answer, encoded: Encoded, index: int) -> np.ndarray | None:
        encoding = encoded.encodings[index]
        places = [(word.start, word.end) for word in words(encoded.texts[index], encoding.offsets, encoding.word_ids)]
        given = words_of_entities(places, answer.spans) if answer.words is None else answer.words
        carried = align_labels(places, given)
        return None if carried is None else word_logits(carried, encoded.labels)

    def certain_logits(self, encoded: Encoded, index: int) -> np.ndarray:
        return certain(encoded.targets[index], len(encoded.labels))

    def label_counts(self, examples: Iterable[Example]) -> Counter[str]:
        """How many entities have each label."""
        return Counter(entity.label for example in examples for entity in example.entities or ())

    def model_labels(self, names: Iterable[str]) -> tuple[str, ...]:
        """The tags of entities with these labels."""
        return bio_tags(names)

    def answer_labels(self, labels: Sequence[str]) -> tuple[str, ...]:
        """The labels of entities in tags."""
        return entity_labels(labels)

    def label_faults(self, labels: Sequence[str]) -> list[str]:
        """Tags that are there twice, have no name, or are in no scheme."""
        faults = name_faults(labels)
        if not faults:
            try:
                faults += [fault] if (fault := tags_fault(labels, "id2label")) else []
            except ValueError as reason:
                faults.append(str(reason))
        return faults

    def check_train(self, splits: Splits) -> None:
        """BadInput without an entity."""
        if not splits.labels(self):
            raise BadInput("No text of train has an entity; at least 1 is needed. Label entities in some texts.")

    def label_warnings(self, examples: Sequence[Example]) -> list[str]:
        counts = self.label_counts(examples)
        return spelling_warnings(examples, counts, prefix_warnings(counts))

    def text_warnings(self, encoded: Encoded, examples: Sequence[Example], where: str) -> list[str]:
        """About entities behind the cut, and those that begin or end inside a word, which no model can match exactly."""
        lost = one_further = unread = 0
        for example, text, encoding in zip(examples, encoded.texts, encoded.encodings, strict=True):
            found = words(text, encoding.offsets, encoding.word_ids)
            starts, ends = {word.start for word in found}, {word.end for word in found}
            reach = max(ends, default=0)
            inside = [
                e for e in example.entities or () if (e.start not in starts or e.end not in ends) and e.end <= reach
            ]
            lost += len(inside)
            unread += sum(e.end > reach for e in example.entities or ()) if encoding.overflowing else 0
            one_further += sum(e.start in starts and e.end + 1 in ends for e in inside)
        cut = (
            [
                f"{unread:,} of {counted(sum(len(each.entities or ()) for each in examples), 'entity', 'entities')} in {where} are behind "
                "the cut, and count as missed. `serve` and `annotate` read such texts whole, in windows."
            ]
            if unread
            else []
        )
        if not lost:
            return cut
        entities = counted(lost, f"entity in {where} begins or ends", f"entities in {where} begin or end")
        inclusive = " Most would match with an `end` of 1 more: it is exclusive." if 2 * one_further > lost else ""
        return [*cut, f"{entities} inside a word: models label whole words and cannot match them exactly.{inclusive}"]

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer, labels: Sequence[str]) -> Encoded:
        """A row a word, whose target is its tag."""
        index = {label: i for i, label in enumerate(labels)}
        encodings: list[Encoding] = tokenizer.encode_batch([example.text_or_pair for example in examples])
        rows: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for example, encoding in zip(examples, encodings, strict=True):
            found = words(example.text, encoding.offsets, encoding.word_ids)
            rows.append(np.array([word.first_token for word in found], dtype=np.int64))
            targets.append(_tags(example, found, index))
        return encoded_rows(self, examples, tokenizer, labels, encodings, rows, targets)

    def gold_of(self, example: Example) -> Prediction:
        return frozenset((entity.start, entity.end, entity.label) for entity in example.entities or ())

    def predictions(self, encoded: Encoded, logits: Sequence[np.ndarray]) -> list[Prediction]:
        """The entities, widened to the words of data that came as words."""
        blanks_in_words = encoded.blanks_in_words or [None] * len(encoded)
        return [
            widened(((span.start, span.end, span.label) for span in spans), text, blanks)
            for spans, text, blanks in zip(scored_spans(encoded, logits), encoded.texts, blanks_in_words, strict=True)
        ]

    def prediction_of(self, answer: Mapping[str, Any], example: Example) -> Prediction:
        """The entities of an answer, widened to the words of data that came as words."""
        found = ((each["start"], each["end"], each["label"]) for each in answer["entities"])
        return widened(found, example.text, example.blanks_in_words)

    def constant_predictions(self, encoded: Encoded) -> Iterator[list[Prediction]]:
        """For each label, the answers of a model that makes each single word such an entity."""
        for index, label in enumerate(with_prefixes(encoded.labels)):
            if split_tag(label)[0] in {"B", "S"}:
                always = np.zeros((1, len(encoded.labels)), dtype=np.float32)
                always[0, index] = 1
                yield self.predictions(encoded, [np.repeat(always, len(rows), axis=0) for rows in encoded.rows])

    def instructions(self) -> str:
        return INSTRUCTIONS

    def read_reply(self, reply: dict[str, Any], example: Example, labels: Sequence[str]) -> dict[str, Any]:
        """The entities at their places in the text."""
        return {"entities": entities_in(reply.get("entities"), example.text, labels)}

    def written_answer(self, encoded: Encoded, index: int, logits: np.ndarray) -> dict[str, Any]:
        """The probabilities of each word's tags."""
        encoding = encoded.encodings[index]
        places = words(encoded.texts[index], encoding.offsets, encoding.word_ids)
        return {
            "words": [
                {"start": word.start, "end": word.end, "tags": written(probabilities, encoded.labels)}
                for word, probabilities in zip(places, softmax(logits), strict=True)
            ]
        }


def _tags(example: Example, found: Sequence[Word], index: dict[str, int]) -> np.ndarray:
    """The tag of each word: that of the entity that overlaps it, with `B` on the first word of an entity."""
    if example.entities is None:
        return np.full(len(found), IGNORED, dtype=np.int64)
    tags = np.full(len(found), index.get("O", IGNORED), dtype=np.int64)
    for row, (at, prefix) in enumerate(entities_at([(word.start, word.end) for word in found], example.entities)):
        if at >= 0:
            tags[row] = index.get(f"{prefix}-{example.entities[at].label}", IGNORED)
    return tags
