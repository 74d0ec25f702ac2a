"""From many callers to batches to worker processes: the queue, the processes, and the supervisor that replaces dead ones."""
