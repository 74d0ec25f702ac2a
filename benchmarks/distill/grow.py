"""Write a teacher twice as wide and twice as deep as another, to test large reductions where no large teacher is available.

    python benchmarks/distill/grow.py --teacher FOLDER --out FOLDER [--head ForSequenceClassification]

A 6x384 teacher becomes a 12x768 teacher with four times the parameters per layer and nearly the same outputs
(`compress.models.grow_teacher`). With `--head` the teacher's head for a task is grown too.
"""

import argparse
from pathlib import Path

import transformers

from compress.engine.lineage import save_with_lineage
from compress.models.grow_teacher import grown
from compress.models.pretrained import open_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--head", default="", choices=["", "ForSequenceClassification", "ForTokenClassification"])
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"--out {given.out} is there already; give another folder")
    opened = open_model(given.teacher)
    kind = getattr(transformers, f"AutoModel{given.head}")
    model = kind.from_pretrained(opened.folder, local_files_only=True, use_safetensors=True)
    given.out.mkdir(parents=True)
    save_with_lineage(grown(model, opened.family), opened, given.out, {"role": "grown teacher"})
    print(f"{given.out}: {opened.config.num_hidden_layers * 2} layers, {opened.config.hidden_size * 2} wide")


if __name__ == "__main__":
    main()
