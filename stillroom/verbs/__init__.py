"""The verbs, a file or a folder each: its docstring is the help, then come its settings, its function in Python, and what it prints."""
