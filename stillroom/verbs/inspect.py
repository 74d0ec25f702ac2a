"""Verify every file of a bundle and describe it."""

import json
from pathlib import Path
from typing import Any

from serve.bundle.cpu import cpu_features, read_cores, suits, why
from serve.bundle.manifest import MANIFEST, Manifest, kinds_of
from serve.bundle.remote_files import shown
from serve.bundle.runtimes import choose
from serve.errors import BundleError
from serve.tasks import open_bundle, task_of
from serve.wording import counted
from stillroom.console import result, table
from stillroom.inputs.folders import local_bundle
from stillroom.verb import Argument, Document, FolderOrUrl, Verb

IN_ONE_LINE = 20  # labels; more are listed on lines of their own
COLUMNS = 100  # width of these lines in characters


def inspect(bundle: Path | str) -> Document:
    """The manifest of a bundle with `verified`, `card_edited` and the `kind` of its labels, once every file is verified.

    Raises:
        BundleError: what is wrong with the bundle.
    """
    folder = local_bundle(bundle)
    opened = open_bundle(folder)
    document: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    kind = task_of(opened.manifest).answer_kind(opened.manifest.labels, kinds_of(opened.manifest))
    checked = {"verified": True, "card_edited": opened.card_edited, "kind": kind}
    return document | checked | {"bundle": shown(bundle), "folder": str(folder)}


def labels_line(manifest: Manifest) -> str:
    """The names of the labels, on lines of their own where they are many; for tags the entity types."""
    task = task_of(manifest)
    if not task.names_labels:
        return f"It {task.does(manifest)}."
    labels = task.label_names(manifest.labels)
    count = counted(len(labels), "label")
    if len(labels) <= IN_ONE_LINE:
        return f"{count}: {', '.join(labels)}"
    lines = [""]
    for i, label in enumerate(labels, 1):
        word = label if i == len(labels) else f"{label},"
        if len(lines[-1]) + len(word) + 1 > COLUMNS or not lines[-1]:
            lines.append(f"  {word}")  # a line never breaks inside a label
        else:
            lines[-1] += f" {word}"
    return f"{count}:" + "\n".join(lines)


def show_bundle(document: Document) -> None:
    """Prints what the bundle is, which variant runs here, its measurements, and its files."""
    bundle = open_bundle(Path(document["folder"]))
    manifest = bundle.manifest
    about = f"{manifest.task} ({document['kind']}), up to {manifest.max_length} tokens"
    result(f"{manifest.name}: {about}; every file verified")
    result(labels_line(manifest))
    try:
        choice = choose(bundle)
        result(
            f"This machine runs {choice.variant} in {choice.runtime}. In Python a call uses {why(read_cores())}; "
            "`serve` and `annotate` use 1 thread per process."
        )
        for note in choice.notes:
            result(f"Note: {note}")
    except BundleError as fault:
        result(f"This machine runs no variant: {fault.message}.")
    for name, variant in manifest.variants.items():
        if variant.promises:
            made = ", ".join(f"{promise} from {least:g} on" for promise, least in variant.promises.items())
            held_by = f", with {variant.promise_confidence}" if variant.promise_confidence else ""
            result(f"{name} promises, by the score of an answer{held_by}: {made}.")
    features, rows = cpu_features(), []
    for name, variant in manifest.variants.items():
        needs = " or ".join(variant.cpu) or "any processor"
        there = suits(variant.cpu, features)
        size = f"{manifest.files[variant.file].bytes / 1e6:.1f}"
        served = f"{name} (default)" if name == manifest.default_variant else name
        below = "" if variant.abstain_below is None else f"{variant.abstain_below:g}"
        sure = [f"{variant.temperature:g}", below]
        rows.append([served, variant.scheme, variant.runtime, needs, "yes" if there else "no", size, *sure])
    header = ["variant", "scheme", "runtime", "needs", "runs here", "MB", "temperature", "abstains below"]
    table("variants", header, rows)
    if scores := _scores(manifest.metrics):
        table(f"{manifest.metrics.get('metric')}, test", ["model", "value", "95 % interval"], scores)
    if compared := _parity(manifest.parity):
        header = [
            "variant",
            "labels changed per 10k",
            "largest difference",
            "99.9th percentile",
            "answers that depend on the batch",
        ]
        chosen = [column for column in range(len(header)) if column != 1 or manifest.labels]  # vectors have no labels
        table(
            "parity with its reference, at shapes that were not used in the export",
            [header[column] for column in chosen],
            [[row[column] for column in chosen] for row in compared],
        )
    files = [[path, f"{file.bytes / 1e6:.2f}", file.sha256[:16]] for path, file in sorted(manifest.files.items())]
    table("files", ["file", "MB", "sha256"], files)
    lineage = {key: value for key, value in manifest.lineage.items() if isinstance(value, str | int | float)}
    result("Lineage: " + (", ".join(f"{key} {value}" for key, value in lineage.items()) or "not recorded"))
    result(f"Digest: {manifest.digest}")


def _scores(metrics: dict[str, Any]) -> list[list[str]]:
    """Rows of the test scores, as far as the manifest has them in the expected form."""
    test = metrics.get("test")
    return [
        [name, f"{row['value']:.4f}", f"{row['low']:.4f} .. {row['high']:.4f}"]
        for name, row in (test.items() if isinstance(test, dict) else [])
        if isinstance(row, dict) and _numbers(row, {"value", "low", "high"})
    ]


def _parity(parity: dict[str, Any]) -> list[list[str]]:
    needed = {"labels_changed_per_10k", "largest", "p999", "company_differences", "company_texts"}
    return [
        [
            name,
            f"{row['labels_changed_per_10k']:.1f}",
            f"{row['largest']:.2g}",
            f"{row['p999']:.2g}",
            f"{row['company_differences']} of {row['company_texts']}",
        ]
        for name, row in parity.items()
        if isinstance(row, dict) and _numbers(row, needed)
    ]


def _numbers(row: dict[str, Any], keys: set[str]) -> bool:
    """Whether `row` has a number for each of `keys`."""
    return all(isinstance(row.get(key), int | float) for key in keys)


VERB = Verb(
    "inspect",
    inspect,
    help=__doc__,
    arguments=(Argument("bundle", "A bundle: its folder or URL.", type=FolderOrUrl()),),
    show=show_bundle,
    examples=("stillroom inspect ner.bundle", "stillroom inspect https://example.com/models/ner"),
)
