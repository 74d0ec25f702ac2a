"""Each cell of the table of families in docs/choosing.md."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from repository import ROOT
from small_task import examples, make_tokenizer, write_rows

import stillroom as face
from compress.models.families import FAMILIES
from compress.models.pretrained import open_model
from serve.errors import BadInput

PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
SMALL = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3, "initializer_range": 0.3,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "roberta": {"max_position_embeddings": 66},
    "xlm-roberta": {"max_position_embeddings": 66},
    "mpnet": {"max_position_embeddings": 66},
}


# How configurations of ModernBERT's architecture were published before transformers 5, with the choices of mmBERT (one base for all
# layers' rotations, padding first) and of Ettin (means of tokens).
PUBLISHED: dict[str, dict[str, Any]] = {
    "mmBERT": {"global_rope_theta": 160000.0, "local_rope_theta": 160000.0, "classifier_pooling": "cls"},
    "Ettin": {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "classifier_pooling": "mean"},
}
OF_MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertForSequenceClassification"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0, "cls_token_id": 2, "decoder_bias": True,
    "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 3, "global_attn_every_n_layers": 3,
    "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0, "layer_norm_eps": 1e-5, "local_attention": 8, "mlp_bias": False,
    "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-5, "sep_token_id": 3,
    "sparse_pred_ignore_index": -100, "sparse_prediction": False,
}  # fmt: skip


def rows() -> list[tuple[list[str], list[str]]]:
    """The names and the cells of each row of the table."""
    table = PAGE.split("### Families\n\n")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [(re.findall(r"`([a-z0-9_-]+)`", first), rest) for first, *rest in cells]


KNOWN, *OTHERS = rows()


def test_the_first_row_has_the_families_that_students_are_made_of() -> None:
    assert set(KNOWN[0]) == set(FAMILIES)
    assert KNOWN[1] == ["yes"] * 4
    assert [cells for _, cells in OTHERS] == [["", "yes", "", "refused at once"]] * 2


def test_the_other_rows_have_those_that_answer() -> None:
    text = (ROOT / "tests" / "compress" / "labelling" / "test_by_model.py").read_text(encoding="utf-8")
    asked = re.findall(r'^    "([a-z0-9_-]+)": {', text.split("\nANSWERING")[1].split("\n}\n")[0], re.M)
    assert set(asked) == set(KNOWN[0]) | {name for names, _ in OTHERS for name in names}


def checkpoint(folder: Path, family: str) -> Path:
    """A small random classifier of `family`, or with a configuration as it is published."""
    import transformers

    if family not in PUBLISHED and family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    make_tokenizer(folder)
    if family in PUBLISHED:
        document = OF_MODERNBERT | PUBLISHED[family] | SMALL | {"num_hidden_layers": 4}
        (folder / "config.json").write_text(json.dumps(document))
        config = transformers.AutoConfig.from_pretrained(folder)
    else:
        config = transformers.AutoConfig.for_model(family, **SMALL | OWN.get(family, {}))
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", [*sorted(FAMILIES), *PUBLISHED])
def test_a_model_of_a_known_family_is_exported_and_answers_as_in_torch(tmp_path: Path, family: str) -> None:
    import transformers

    model = checkpoint(tmp_path / "model", family)
    if family in PUBLISHED:
        # The file itself is what was published, and not as this transformers writes it.
        written = OF_MODERNBERT | PUBLISHED[family] | SMALL | {"num_hidden_layers": 4}
        (model / "config.json").write_text(json.dumps(written))
    texts = write_rows(tmp_path / "texts.jsonl", examples(60, seed=1))
    given: dict[str, Any] = {"variants": ("fp32", "int8"), "texts": [str(texts)], "gate": 0.0, "latency_seconds": 0}
    face.export(model, tmp_path / "bundle", **given, threads=1)
    text = "please refund the lamp"
    inputs = transformers.AutoTokenizer.from_pretrained(model)([text], return_tensors="pt")
    in_torch = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        scores = in_torch(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[0].softmax(-1)
    expected = {in_torch.config.id2label[i]: score for i, score in enumerate(scores.tolist())}
    assert (
        max(expected.values()) - min(expected.values()) > 0.15
    )  # so that a graph that answers anything else is found out
    for variant, tolerance in (("fp32", 1e-4), ("int8", 0.1)):
        said = face.Pipeline(tmp_path / "bundle", variant=variant)(text)["labels"]
        found = {each["label"]: each["score"] for each in said}
        assert found.keys() == expected.keys()
        for name, score in expected.items():
            np.testing.assert_allclose(found[name], score, atol=tolerance)


@pytest.mark.parametrize("family", sorted(name for names, _ in OTHERS for name in names))
def test_a_model_of_another_family_is_refused_by_export_at_once(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"model_type": "{family}", "architectures": ["AnyForTokenClassification"]}}')
    with pytest.raises(BadInput, match=family):
        face.export(folder, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    with pytest.raises(BadInput, match=f"can teach by its answers: stillroom run --teacher {folder} --start"):
        open_model(str(folder))
