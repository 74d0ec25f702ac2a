"""Measures candidates, each in its own process, in alternating turns; every sample is kept."""
