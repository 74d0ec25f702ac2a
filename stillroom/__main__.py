"""`python -m stillroom`: the command line."""

from stillroom.cli.main import main

main()
