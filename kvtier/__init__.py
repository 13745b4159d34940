"""kvtier: a tiered store for the KV cache of language models. A get returns exactly what was put under exactly that key, or nothing.

Start with `kvtier.layout` (sizes and offsets) and `kvtier.identity` (what makes two blocks interchangeable).
"""

__version__ = "0.1.0"
