"""A masked-language-model head for teachers that were published without theirs."""

from compress.methods.catalogue import VOCABULARY_LABELS, Stage
from compress.methods.objectives import Objective

# Only the head trains: the encoder and its embeddings, which the head shares, do not change.
HEAD_STAGE = Stage("head for masked words", Objective(outputs=(VOCABULARY_LABELS,)), trains="head", learning_rate=1e-3)
