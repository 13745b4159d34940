"""One byte a page: 1 where its slot holds FP8. Here the attention backend and the connector of a process meet.

The flag holds for all layers and KV cache groups, whose page ids are of one pool. The backend's write of new tokens
clears it, in the kernel, and nothing else does but a restore, which sets it last. A hit on the engine's own prefix
cache keeps it. Page 0 is never restored (blocks outside a sliding window have that id). The tensor's address never
changes once the caches are registered: graphs are captured after that, and read it.

Not thread-safe as a whole: the engine's thread makes tensors; it and the mover's threads write bytes of pages they own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_flags: torch.Tensor | None = None
_fixed = False
# Of tests: called with the page ids and flags of every sequence that is read.
watch: Callable[[torch.Tensor, torch.Tensor], None] | None = None


def of(cache: torch.Tensor) -> torch.Tensor:
    """The flags of a layer's cache [pages, ...]. Before `fix` they follow its size, as a profiling run does."""
    global _flags
    if _flags is None or _flags.shape[0] != cache.shape[0] or _flags.device != cache.device:
        if _fixed:
            size = f"{cache.shape[0]} pages on {cache.device}"
            raise RuntimeError(f"kvtier: flags were made for another cache than one of {size}")
        _flags = torch.zeros(cache.shape[0], dtype=torch.uint8, device=cache.device)
    return _flags


def fix(cache: torch.Tensor) -> torch.Tensor:
    """The flags from now on, all 0: the engine has its caches. Starts anew for new ones (after a sleep)."""
    global _fixed
    _fixed = False
    flags = of(cache)
    flags.zero_()
    _fixed = True
    return flags
