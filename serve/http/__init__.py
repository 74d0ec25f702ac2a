"""The HTTP server: the application, its endpoints, access, and connections."""
