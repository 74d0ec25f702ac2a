"""What each verb does, a file or a folder each. No verb calls another, but `demo` calls `run`."""
