"""`python -m kvtier.cli` is `kvtier`."""

from kvtier.cli.app import main

if __name__ == "__main__":
    main()
