"""A file or folder per verb, with what the verb does. No verb calls another, except that `demo` calls `run`."""
