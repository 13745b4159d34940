"""Connectors: what lets an engine keep its KV cache in kvtier. Roof of the house; each engine is imported in its own subpackage only."""
