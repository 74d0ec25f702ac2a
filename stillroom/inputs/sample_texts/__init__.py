"""Texts that this program makes: labelled support messages for the demo, and texts to time where none are given."""
