"""One training: the loop, checkpoints, metrics and trackers and checks of the loss."""
