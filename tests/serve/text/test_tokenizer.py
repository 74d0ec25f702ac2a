"""What a bundle's tokenizer gives the model."""

import json
from pathlib import Path

from lookup_bundles import VOCABULARY, city_table, write_bundle, write_manifest, write_tokenizer

from serve.model.pipeline import Pipeline


def test_a_special_token_without_a_row_in_the_embedding_is_read_as_characters(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "cities", city_table())
    write_tokenizer(bundle, special=["[USER]"])
    (bundle / "config.json").write_text(json.dumps({"vocab_size": len(VOCABULARY)}))
    write_manifest(bundle)
    pipeline = Pipeline(bundle)
    for texts in (["[USER] to rome", "oslo"], ["[USER] [USER]"]):
        pipeline(texts)
    (found,) = pipeline("[USER] to rome")["entities"]
    assert (found["start"], found["end"], found["label"]) == (10, 14, "city")
