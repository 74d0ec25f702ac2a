"""Sockets, TLS, limits on connections, accepting them, and shutting down without losing a request."""
