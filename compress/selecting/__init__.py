"""Selecting texts worth labelling from a bank of unlabelled ones."""
