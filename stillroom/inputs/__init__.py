"""Inputs of a verb: the recipe, and the checks before any work."""
