"""`python -m kvtier.quality.demo` runs the demo, as `make demo` does."""

import sys

from kvtier.quality.demo.driver import main

if __name__ == "__main__":
    sys.exit(main())
