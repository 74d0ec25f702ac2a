"""The verbs, a file each: its docstring is the help, then come its settings, its function in Python, and what it prints."""
