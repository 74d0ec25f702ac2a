"""The endpoints described: OpenAPI 3.1 of `/v1` and `/v2`, and the page that `/docs` shows."""
