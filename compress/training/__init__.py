"""One training: the loop, its checkpoints, what feeds it and what watches it."""
