"""Benchmarks: `python -m bench.NAME` from the repository's root. Not installed with the package.

`ceilings` measures what the machine itself can do, `planes` the store against those ceilings. Docs: docs/benchmarks.md.
"""
