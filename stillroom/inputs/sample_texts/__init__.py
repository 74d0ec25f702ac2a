"""Generated texts: labelled support messages for the demo, and texts for timing when none are given."""
