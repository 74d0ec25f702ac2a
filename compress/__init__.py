"""Teacher to student checkpoint: reading labelled text, fine-tuning, distilling, scoring."""
