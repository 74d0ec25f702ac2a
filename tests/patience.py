"""How long a test waits for something to happen."""

# A wait ends as soon as what it waits for has happened, so on a good day a long one costs nothing. On a machine that many
# share, a process that gets a tenth of a core may take tens of seconds for what takes one otherwise. Only what a test lets
# expire on purpose is shorter. Several such waits fit into the 600 s that pytest gives a test.
PATIENCE_S = 60
