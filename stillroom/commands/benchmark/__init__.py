"""`stillroom benchmark`: fine-tunes a model on the tasks of a suite, and sets its scores beside the papers'."""
