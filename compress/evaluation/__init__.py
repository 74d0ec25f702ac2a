"""A model's predictions on texts, their metrics and bootstrap intervals."""
