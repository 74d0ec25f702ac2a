"""A head that guesses masked words, for teachers that were published without theirs."""

from compress.methods import VOCABULARY_LABELS, Stage
from compress.objectives import Objective
from compress.teacher import Opened

# The encoder and its embeddings, which the head shares, stay as they are: what the head says is what the encoder knows.
HEAD_STAGE = Stage("head for masked words", Objective(outputs=(VOCABULARY_LABELS,)), trains="head", learning_rate=1e-3)


def has_vocabulary_head(opened: Opened) -> bool:
    """Whether the model was saved with a head for masked words."""
    return any(str(name).endswith("ForMaskedLM") for name in opened.config.architectures or [])
