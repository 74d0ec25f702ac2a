"""Losses as pure functions of tensors, and their fast forms."""
