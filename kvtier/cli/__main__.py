"""`python -m kvtier.cli` is `kvtier`."""

from kvtier.cli.app import main

main()
