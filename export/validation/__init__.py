"""Whether a graph answers as torch does, and how far its probabilities hold."""
