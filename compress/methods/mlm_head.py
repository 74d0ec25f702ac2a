"""A head that guesses masked words, for teachers that were published without theirs."""

from compress.methods.catalogue import VOCABULARY_LABELS, Stage
from compress.methods.objectives import Objective

# The encoder and its embeddings, which the head shares, stay as they are: what the head says is what the encoder knows.
HEAD_STAGE = Stage("head for masked words", Objective(outputs=(VOCABULARY_LABELS,)), trains="head", learning_rate=1e-3)
