"""The description of the endpoints: OpenAPI 3.1 of `/v1`, and the page at `/docs`."""
