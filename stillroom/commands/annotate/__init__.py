"""`stillroom annotate`: answers to a file of any size."""
