"""Metrics, logs, traces, and the context of each request."""
