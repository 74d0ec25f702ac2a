"""Requests in, answers out: the application, its endpoints, who may ask, and the connections."""
