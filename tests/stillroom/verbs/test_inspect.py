import json
from pathlib import Path

import pytest
from in_process import command
from lookup_bundles import INTENTS, city_table, intent_table, write_bundle, write_relations_bundle

from serve.tasks import open_bundle
from stillroom.verbs.inspect import inspect, labels_line, show_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle that nothing here can run, and whose words would break a careless table."""
    variant = {
        "file": "onnx/model.onnx", "scheme": "static", "runtime": "onnxruntime", "cpu": ["a_processor_of_2040"],
        "temperature": 1.2345, "abstain_below": 0.4321,
    }  # fmt: skip
    odd: dict[str, object] = {
        "name": "[/b] odd", "lineage": {"teacher": "[/b]"}, "parity": {"int8": {"largest": None}},
        "metrics": {"metric": "accuracy", "test": {"[/i]": {"value": "high", "low": 0, "high": 1}}},
    }  # fmt: skip
    what = {"task": "text-classification", "labels": INTENTS, "default_variant": "int8", "variants": {"int8": variant}}
    return write_bundle(tmp_path / "odd", intent_table(), **what, **odd)


def test_a_bundle_that_cannot_run_here_is_explained_all_the_same(bundle: Path) -> None:
    code, out, said = command("inspect", bundle)
    assert code == 0, said
    shown = " ".join(out.split())
    assert "every file verified" in shown
    assert "variant 'int8' of '[/b] odd' needs a processor with one of a_processor_of_2040" in shown
    assert "1.2345" in shown
    assert "0.4321" in shown
    assert json.loads(command("inspect", bundle, "--json").out)["verified"] is True


def test_the_kind_of_labels_and_the_labels_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    intents: dict[str, object] = {"task": "text-classification", "labels": INTENTS}
    made = {
        "entities, BIO": write_bundle(tmp_path / "cities", city_table()),
        "single label": write_bundle(tmp_path / "intents", intent_table(), **intents),
        "multi-label": write_bundle(tmp_path / "several", intent_table(), **intents, multi_label=True),
        "single label, text pairs": write_bundle(tmp_path / "pairs", intent_table(), **intents, pairs=True),
        "single label, relations": write_relations_bundle(tmp_path / "relations"),
    }
    for kind, folder in made.items():
        document = inspect(folder)
        assert (document["kind"], document["verified"]) == (kind, True)
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        assert {key: document[key] for key in manifest} == manifest
        show_bundle(document)
        shown = capsys.readouterr().out
        assert f"{folder.name}: {manifest['task']} ({kind}), up to 32 tokens; every file verified" in shown
        assert ("1 label: city" if kind.startswith("entities") else "3 labels: ") in shown


def test_many_labels_are_listed_in_lines_that_break_between_them(tmp_path: Path) -> None:
    import numpy as np

    for count in (20, 21, 151):
        labels = [f"label - {i}" for i in range(count)]
        table = np.zeros((intent_table().shape[0], count))
        folder = write_bundle(tmp_path / str(count), table, task="text-classification", labels=labels)
        first, *lines = labels_line(open_bundle(folder).manifest).split("\n")
        if count == 20:
            assert (first, lines) == (f"20 labels: {', '.join(labels)}", [])
            continue
        assert first == f"{count} labels:"
        assert " ".join(line.strip() for line in lines) == ", ".join(labels)
        assert all(line.startswith("  label - ") and len(line) <= 100 for line in lines)
        assert all(len(line) > 80 for line in lines[:-1])
