"""The HTML pages: style, charts and tables."""
