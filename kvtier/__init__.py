"""kvtier: a tiered store for the KV cache of language models. A get returns exactly what was put under exactly that
key, or nothing.

Start with `kvtier.format.layout` (sizes and offsets) and `kvtier.format.identity` (what makes two blocks
interchangeable). `kvtier.Client` is the way in.
"""

from typing import TYPE_CHECKING, Any

from kvtier.version import __version__

if TYPE_CHECKING:
    from kvtier.client.api import Client

__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    """`kvtier.Client`, imported when it is asked for: the daemon and the kernels need only the floors below it."""
    if name == "Client":
        from kvtier.client.api import Client

        return Client
    raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
