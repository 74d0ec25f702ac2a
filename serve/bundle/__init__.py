"""A bundle on disk: reading and verifying it, and which of its variants this machine runs."""
