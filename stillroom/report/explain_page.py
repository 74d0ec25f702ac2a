"""The output of `stillroom explain`: tables for the terminal and the page, and an HTML page with attention to look at."""

from collections.abc import Sequence
from textwrap import shorten
from typing import Any

from stillroom.report.charts import Plane, dot, kind_of, line, linear_axis, plot
from stillroom.report.drawings import Chart, Key
from stillroom.report.formats import Cell, Table, score, table
from stillroom.report.pages import Part, rendered

MODELS = ("teacher", "student")
MOST_CHARACTERS = 300  # of a text in a table of the page; the document has all of it


def layer_table(document: dict[str, Any]) -> Table:
    """A row per pair of layers: the divergences of attention and of value relations."""
    rows = document["layers"]
    by_head = [row["attention_by_head"] for row in rows]
    return table(
        ("layers", [_layers(row) for row in rows]),
        ("attention, mean of heads", [score(row["attention"]) for row in rows]),
        ("head by head, mean", [score(sum(heads) / len(heads)) if heads else None for heads in by_head]),
        ("closest head", [score(min(heads)) if heads else None for heads in by_head]),
        ("farthest head", [score(max(heads)) if heads else None for heads in by_head]),
        ("values", [score(row["value_relation"]) for row in rows]),
    )


def cluster_table(document: dict[str, Any]) -> Table | None:
    """A row per layer: the agreement of clusters and labels in each model; None where it was left out."""
    found = document["span_clusters"]
    if "left_out" in found:
        return None
    deepest = max(len(found[name]) for name in MODELS)

    def cells(values: list[float]) -> list[Cell]:
        return [*map(score, values), *[None] * (deepest - len(values))]

    layers: list[Cell] = [str(layer) for layer in range(1, deepest + 1)]
    return table(("layer", layers), *((name, cells(found[name])) for name in MODELS))


def sentences(document: dict[str, Any]) -> list[str]:
    """What the tables do not say, in sentences for the terminal."""
    found = [f"{document[key]['left_out']}." for key in ("span_clusters", "answers") if "left_out" in document[key]]
    if "left_out" not in document["answers"]:
        found.append(_answers(document))
    return [sentence[0].upper() + sentence[1:] for sentence in found]


def _answers(document: dict[str, Any]) -> str:
    """How far the answers of both models are apart, in a sentence."""
    found = document["answers"]
    if "mean_difference" in found:
        return f"The numbers that the models give differ by {found['mean_difference']:.4g} on average."
    return f"The models answer differently on {found['differing_texts']} of {document['texts']} texts."


def page(document: dict[str, Any], shown: Sequence[dict[str, Any]]) -> str:
    """One self-contained HTML document. `shown` are texts with their attention, see `stillroom.verbs.explain.shown`."""
    rows, spans, answers = document["layers"], document["span_clusters"], document["answers"]
    by_head = [row for row in rows if row["attention_by_head"]]
    heads = range(len(by_head[0]["attention_by_head"]) if by_head else 0)
    by_head_table = table(
        ("layers", [_layers(row) for row in by_head]),
        *((f"head {head + 1}", [score(row["attention_by_head"][head]) for row in by_head]) for head in heads),
    )
    clusters: list[Part] = [f"Left out: {spans['left_out']}."] if "left_out" in spans else [
        ("note", "explain_clusters", spans), _agreement(document), cluster_table(document),
    ]  # fmt: skip
    answered: list[Part] = [f"Left out: {answers['left_out']}."] if "left_out" in answers else [
        ("said", "explain_answers", _answers(document), answers), _texts(answers["differing"]),
    ]  # fmt: skip
    longest_cut = max((len(text["tokens"]) for text in shown if text["cut"]), default=0)
    settings = {key: value for key, value in document["settings"].items() if value not in ("", ())}
    return rendered(
        "What the student learned",
        [("note", "explain", document)],
        [
            ("layers", "Attention and values, layer by layer", [
                ("note", "explain_layers", document), layer_table(document), ("under", "Attention, head by head", [by_head_table]),
            ]),
            ("clusters", "Clusters of spans", clusters),
            ("attention", "Where tokens attend", [("attention", longest_cut, shown)]),
            ("texts", "Texts whose attention differs most", [_texts(document["most_different"])]),
            ("answers", "Answers", answered),
            ("settings", "Settings", [settings]),
        ],
        script="attention.js",
    )  # fmt: skip


def _layers(row: dict[str, Any]) -> str:
    return f"teacher {row['teacher_layer']}, student {row['student_layer']}"


def _agreement(document: dict[str, Any]) -> Chart:
    """The agreement of clusters and labels by layer, a line for each model."""
    found = document["span_clusters"]
    points = [[(float(layer), value) for layer, value in enumerate(found[name], 1)] for name in MODELS]
    every = [point for of in points for point in of]
    plane = Plane(linear_axis("layer", [x for x, _ in every]), linear_axis("NMI", [y for _, y in every]))
    parts = [line(plane, of, kind_of(i)) for i, of in enumerate(points)]
    parts += [dot(plane, point, kind_of(i)) for i, of in enumerate(points) for point in of]
    legend = [Key(i, name, document[name]["name"], "line") for i, name in enumerate(MODELS)]
    return plot(plane, parts, "Agreement of clusters of spans and labels by layer", legend)


def _texts(rows: Sequence[dict[str, Any]]) -> Table:
    """A row per text, with both answers, if there are any."""
    whole = [" | ".join(row[key] for key in ("text", "text_pair") if key in row) for row in rows]
    texts = [shorten(text, MOST_CHARACTERS, placeholder=" ...") for text in whole]
    answers = [(name, [_answer(row, name) for row in rows]) for name in MODELS]
    return table(
        ("text", list(texts)),
        ("attention", [score(row["attention"]) for row in rows]),
        *answers,
        words=True,
        rows_are="texts",
    )


def _answer(row: dict[str, Any], name: str) -> Cell:
    """An answer as text: a class, a number, labels, or the pieces of text that are entities."""
    answer = row.get(f"{name}_answer")
    if answer is None or isinstance(answer, str | float):
        return answer
    named = [item if isinstance(item, str) else f"{item[2]}: {row['text'][item[0] : item[1]]}" for item in answer]
    return "; ".join(named) or "none"
