"""Many callers to batches to processes: the queue, the model's processes, and what replaces one that dies."""
