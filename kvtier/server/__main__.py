"""`python -m kvtier.server` is `kvtier-server`."""

from kvtier.server.main import main

main()
