"""The memory tier: who may use which bytes, and who goes first when there are too few.

What each file decides:

store             the verbs under one lock: reserve, seal, abort, lease, release, lookup, delete
ledger            which blocks are known, where they stand, who holds them
arena             the shared memory that holds every slot, sealed against shrinking
slabs             which slots exist and which are free; one slot size a slab at a time
room              who gets a slot: a free one, an empty slab, or the slot of what is worth least
order             which block is evicted next
policy            what a block is worth, shares of sessions and tenants, what is worth writing down: pure functions
movers            the verbs for copying blocks between tiers, and what the store asks of the tiers below
aging             blocks of one namespace that were not used for too long
accounts          what callers hold, and their caps
namespaces        registered descriptions and their handles; the nearest one, explained
expiry            times-to-live, and the thread that acts on them

Nothing here does I/O but the memory that the arena asks of the kernel.
"""
