"""Whether a graph answers as torch does, and how reliable its probabilities are."""
