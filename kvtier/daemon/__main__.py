"""`python -m kvtier.daemon` is `kvtier-server`."""

from kvtier.daemon.cli import main

main()
