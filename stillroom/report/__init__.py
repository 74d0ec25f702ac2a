"""Every HTML page: its style, charts and tables."""
