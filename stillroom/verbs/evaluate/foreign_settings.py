"""Settings that are for another kind of model than the one that is given."""

from serve.errors import BadInput
from stillroom.verbs.evaluate import Evaluation


def refuse_revision(model: str, given: Evaluation) -> None:
    """BadInput for a revision of the bundle `model`."""
    if given.revision:
        raise BadInput(
            f"--revision {given.revision}: {model} is a bundle, and only models of the Hub have revisions. Leave it out."
        )


def refuse_variant(model: str, given: Evaluation) -> None:
    """BadInput for a variant of the checkpoint `model`."""
    if given.variant:
        raise BadInput(f"--variant {given.variant}: {model} is not a bundle, and only bundles have variants.")
