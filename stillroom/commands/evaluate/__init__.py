"""`stillroom evaluate`: what a model scores on a data set."""
