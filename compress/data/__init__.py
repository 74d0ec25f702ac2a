"""Examples and their readers, plain text, batches, and the order in which they are seen."""
