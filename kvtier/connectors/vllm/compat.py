"""Which vLLM versions there are. The connector is written against 0.32 and 0.33, which differ in additions only:

0.33 adds supports_sleep_mode, unregister_kv_caches and restore_kv_caches, and gives the configuration
num_hash_lookahead_tokens. A test compares the signatures of the installed version with what was recorded of both.
"""

from __future__ import annotations

import logging

import vllm

TESTED = ("0.32", "0.33")
log = logging.getLogger(__name__)


def prepare() -> None:
    """Lets kvtier's log go where vLLM's goes, and warns of a version that the connector is not tested with."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = theirs.handlers, False
        ours.setLevel(theirs.getEffectiveLevel())
    if not str(vllm.__version__).startswith(TESTED):
        said = "kvtier is tested with vLLM %s, not %s: its connector interface may have changed"
        log.warning(said, " and ".join(TESTED), vllm.__version__)
