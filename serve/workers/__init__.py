"""From many callers to batches to the threads that run the model."""
