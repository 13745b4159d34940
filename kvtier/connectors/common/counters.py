"""What connectors count, whatever the engine.

Blocks are counted once per span of tokens, by the half that schedules, whatever the number of ranks, groups and tries;
bytes and seconds are each rank's own. A question counts when its request is admitted, so tries again add nothing. No
label holds a key, a salt, a request or a token.
"""

from __future__ import annotations

# name -> (what it means, label)
COUNTERS: dict[str, tuple[str, str]] = {
    "lookup_queried_blocks": ("Blocks of admitted requests that the store was asked for.", ""),
    "lookup_hit_blocks": ("Of these, blocks that were known and held.", ""),
    "lookup_failures": ("Questions that counted as a miss because nobody answered in time, by reason.", "reason"),
    "load_asked_blocks": ("Blocks that workers were told to load.", ""),
    "load_served_blocks": ("Of these, blocks that every rank has loaded.", ""),
    "load_failed_blocks": ("Of these, blocks that some rank could not load; they are recomputed.", ""),
    "hit_tokens": ("Tokens that were really served from the store.", ""),
    "load_bytes": ("Bytes copied into the engine's cache.", ""),
    "load_seconds": ("Seconds that loads took, from plan to end.", ""),
    "load_failures": ("Loads that failed on a rank, by reason.", "reason"),
    "save_bytes": ("Bytes copied out of the engine's cache.", ""),
    "save_seconds": ("Seconds spent on saving.", ""),
    "save_blocks": ("Blocks stored.", ""),
    "save_known_blocks": ("Blocks that were stored already.", ""),
    "save_dropped_blocks": ("Blocks that were not stored, by reason.", "reason"),
    "quantize_seconds": ("Of the seconds spent on saving, those spent on quantizing (modes dual and expand).", ""),
    "verbatim_blocks": ("Engine blocks that were FP8 in their slot already, saved as they are (mode dual).", ""),
    "expand_blocks": ("Blocks that were dequantized on their way into the engine's cache (mode expand).", ""),
    "expand_bytes": ("Bytes of native elements that this wrote.", ""),
    "expand_seconds": ("Seconds that this took, on the device where there is one.", ""),
    "clipped_codes": ("FP8 codes at the top of their range in stored blocks: values that did not fit their scale.", ""),
}
GAUGES: dict[str, tuple[str, str]] = {
    "healthy": ("1 while the daemon answers, by half of the connector.", "half"),
    "mode": ("1 for the mode in use: native, passthrough, dual, expand or off.", "mode"),
}
