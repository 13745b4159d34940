"""The memory tier: who may use which bytes, and who goes first when there are too few.

What each file decides:

store             the verbs under one lock: reserve, seal, abort, lease, release, lookup, delete; copying between tiers
ledger            which blocks are known, where they stand, who holds them
arena             the shared memory that holds every slot, sealed against shrinking
allocator         which slots exist and which are free; who gets one, and what is evicted for it
eviction          which block goes next, what is worth writing down, shares of sessions and tenants, blocks long unused
accounts          what callers hold (their caps: store, eviction)
namespaces        registered descriptions and their handles; the nearest one, explained
expiry            times-to-live, and the thread that acts on them
store_counters    what has been done since the start, for metrics

Nothing here does I/O but the memory that the arena asks of the kernel.
"""
