"""Writes a teacher's answers to texts: of a model of transformers, of a command, or of an endpoint."""
