"""Scenarios: single stream, offline, server under a rate, and a sweep over threads and processes."""
