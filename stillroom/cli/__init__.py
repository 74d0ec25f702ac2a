"""The command line: parse, call one command, print."""
