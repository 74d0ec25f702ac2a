"""How long a test waits for something to happen."""

# A wait ends as soon as what it waits for has happened, so on a good day a long one costs nothing. On a machine that many
# share, a process that gets a tenth of a core may take minutes for what takes seconds otherwise. Only what a test lets expire
# on purpose is shorter. What works, such as a whole run, has no limit of its own but that of pytest, which several waits fit into.
PATIENCE_S = 300
