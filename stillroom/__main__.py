"""`python -m stillroom`: the command line."""

from stillroom.cli import main

main()
