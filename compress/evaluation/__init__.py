"""What a model says of texts, and how well: predictions, metrics, bootstrap intervals."""
