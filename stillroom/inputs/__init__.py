"""What a verb is given: the recipe, and the checks before any work."""
