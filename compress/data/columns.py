"""The names of the columns of data, and messages about missing columns."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from compress.data.task import Task
from serve.errors import BadInput

# Common names of the columns, for a hint in messages.
USUAL_NAMES = {
    "text": ("text", "sentence", "content", "utterance", "message", "query", "question", "document", "review", "body"),
    "label": (
        "label",
        "labels",
        "category",
        "class",
        "intent",
        "target",
        "sentiment",
        "topic",
        "score",
        "rating",
        "stars",
        "accept",
    ),
    "entities": ("entities", "spans"),
    "tokens": ("tokens", "words", "token", "word", "sentence", "text"),
    "tags": ("tags", "ner_tags", "ner", "labels", "label", "entities", "tag"),
    "question": ("question", "query", "text"),
    "context": ("context", "passage", "paragraph", "document"),
    "answers": ("answers", "answer"),
}


@dataclass(frozen=True)
class Columns:
    """The names of the fields of a row, or of the columns of a table; the same for all files of one data set."""

    text: str = "text"
    text_pair: str = "text_pair"
    label: str = "label"
    entities: str = "entities"
    tokens: str = "tokens"
    tags: str = "tags"
    """With the default name `ner_tags` is read too."""
    question: str = "question"
    context: str = "context"
    answers: str = "answers"

    def __post_init__(self) -> None:
        # One row may hold all of these.
        for together in (("text", "text_pair", "label"), ("tokens", "tags"), ("question", "context", "answers")):
            names = [getattr(self, field) for field in together]
            same = [field for field, name in zip(together, names, strict=True) if names.count(name) > 1]
            if same:
                flags = " and ".join(f"--{field.replace('_', '-')}-column" for field in same)
                raise BadInput(f"{flags} name the same column, {getattr(self, same[0])}; give each another column.")

    def refuse_unused(self, task: Task) -> None:
        """BadInput where a column was named that examples of `task` are not read from."""
        unused = [name for name, value in vars(self).items() if value != name and name not in task.columns]
        if unused:
            flags = " and ".join(f"--{name.replace('_', '-')}-column" for name in unused)
            raise BadInput(
                f"{flags} {'have' if unused[1:] else 'has'} no effect on {task.name}. Leave {'them' if unused[1:] else 'it'} out."
            )

    def tags_in(self, names: Container[str]) -> str | None:
        """The name in `names` that holds the tags; None if there is none."""
        if self.tags in names:
            return self.tags
        return "ner_tags" if self.tags == "tags" and "ner_tags" in names else None

    def entities_in(self, row: Mapping[str, object]) -> str | None:
        """The name that holds the entities of `row`; None if there is none, or words with tags are there.

        With the default name it may be `spans`, as in Prodigy, which writes none where a text has none; or a list `label` of places, as in
        doccano and Label Studio.
        """
        tokens = row.get(self.tokens)
        of_prodigy = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], dict)
        if self.entities in row or (of_prodigy and self.entities != USUAL.entities):
            return self.entities
        if self.entities != USUAL.entities or (self.tokens in row and self.tags_in(row) and not of_prodigy):
            return None
        if "spans" in row or of_prodigy:
            return "spans"
        lists = (name for name in ("label", "labels") if self.text in row and isinstance(row.get(name), list))
        return next((name for name in lists if all(isinstance(each, list | dict) for each in row[name])), None)  # type: ignore[attr-defined]

    def has_spans(self, names: Container[str]) -> bool:
        """Whether entities are in a column `spans` in place of `entities`."""
        return self.entities == USUAL.entities and "spans" in names and not self.tags_in(names)

    def needed(self, names: Sequence[str], task: Task | None) -> list[str]:
        """The fields of `Columns` that rows with `names` need for `task`; without a task, for their text alone."""
        return ["text"] if task is None else task.needed_columns(self, names)

    def needed_texts(self) -> list[str]:
        """The needed fields of one text or a pair of texts: the second one where its column was named."""
        return ["text", *(["text_pair"] if self.text_pair != USUAL.text_pair else [])]

    def missing(self, names: Sequence[str], task: Task | None) -> list[str]:
        """The needed fields that rows with `names` lack."""
        there = {*names} | ({self.tags} if self.tags_in(names) else set())
        there |= {self.entities} if self.has_spans(names) else set()
        return [field for field in self.needed(names, task) if getattr(self, field) not in there]

    def fault(self, names: Sequence[str], task: Task | None) -> str | None:
        """The fault of a table whose columns are `names`, as text; None if it has none."""
        missing = self.missing(names, task)
        if not missing:
            twice = sorted({name for name in vars(self).values() if names.count(name) > 1})
            return f"has the column {' and '.join(twice)} twice; give each column another name" if twice else None
        named = ", ".join(name for name in names if name)
        has = f"has the columns {named}" if named else "has no column names in its first line"
        needed = " and ".join(getattr(self, field) for field in self.needed(names, task))
        flags = self._flags(missing, self._free(names))
        return f"{has}; {needed} {'are' if ' and ' in needed else 'is'} needed. Rename columns, or give {flags}"

    def fault_of_row(self, row: Mapping[str, object], task: Task | None) -> str:
        """The fault of a row that lacks a field, as text."""
        missing, names = self.missing([*row], task), [*map(str, row)]
        lists = _lists_of_words(row) if "entities" in missing else []
        flags = self._flags(["tokens", "tags"], lists) if lists else self._flags(missing, self._free(names))
        if advice := advice_on(row):
            return advice
        lacks = " and no ".join(f"`{getattr(self, field)}`" for field in missing)
        if "entities" in missing:
            lacks = f"`{self.text}` with `{self.entities}`, and no `{self.tokens}` with `{self.tags}`"
        fields = f"its fields: {', '.join(names)}" if names else "it has no fields"
        return f"has no {lacks} ({fields}); rename fields, or give {flags}"

    def _free(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are no names of fields."""
        return [name for name in names if name and name not in vars(self).values()]

    def _flags(self, missing: Iterable[str], names: Sequence[str]) -> str:
        """The flags for the `missing` fields, each with the most likely of `names`."""
        flags = []
        for field in missing:
            likely = (name for name in names if name.strip().lower() in USUAL_NAMES.get(field, ()))
            flags.append(f"--{field.replace('_', '-')}-column {next(likely, 'NAME')}")
        return " ".join(flags)


def advice_on(row: Mapping[str, object]) -> str:
    """What is wrong with a row that lacks a field, where it looks like a known format or like a whole file; else empty."""
    lists = [name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    has_text = any(isinstance(value, str) and " " in value for value in row.values())
    usual = {name.casefold() for name in row} & {*USUAL_NAMES["label"]}
    ones = [
        name for name, value in row.items() if value in (0, 1, "0", "1") and name.casefold() not in ("id", "index", "")
    ]
    if {"data", "annotations"} <= row.keys():
        advice = "is a task of Label Studio; export the project as JSON-MIN, or as CoNLL2003 for words with tags"
    elif isinstance(row.get("cats"), dict):
        advice = "has `cats` as spaCy writes them; give `label`, the name of the one that is true, or a list of them"
    elif {"columns", "data"} <= row.keys():
        advice = "is a table as pandas' orient='split' writes it; write it by to_json(orient='records', lines=True)"
    elif row and all(isinstance(value, dict) for value in row.values()):
        advice = "is one object of objects; give these alone, one a line: jq -c '.[]' FILE > FILE.jsonl"
    elif lists == ["tokens"]:
        advice = "has objects in `tokens`; give words as strings, and their tags in a list `tags`, or a `text` with `entities`"
    elif lists and not has_text:
        advice = f"has a list `{lists[0]}` of objects; if these are the rows, give them alone: jq -c '.{lists[0]}[]' FILE > FILE.jsonl"
    elif len(ones) > 1 and not usual:
        advice = f"has 0 or 1 in {', '.join(ones[:3])}; if these are labels, give one field `label`, a list of the names that are 1"
    else:
        advice = ""
    return advice


def _lists_of_words(row: Mapping[str, object]) -> list[str]:
    """The fields of a row that hold lists of words, tags or numbers of tags, if there are two or more of one length."""
    found = {
        name: len(value)
        for name, value in row.items()
        if isinstance(value, list) and value and all(isinstance(each, str | int) for each in value)
    }
    lengths = [*found.values()]
    return [name for name, length in found.items() if lengths.count(length) > 1]


USUAL = Columns()


def columns_of(settings: object) -> Columns:
    """The columns named by the fields `text_column`, `label_column`, ... of `settings`; empty fields keep the default names."""
    given = {field.name: getattr(settings, f"{field.name}_column", "") for field in fields(Columns)}
    return Columns(**{name: value for name, value in given.items() if value})
