"""Request bodies of the `/v1` endpoints, and their checks."""
