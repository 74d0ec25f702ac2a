"""One training: the loop, checkpoints, prefetching of batches, trackers and checks of the loss."""
