"""What lies below memory: the contract of a tier, and copying down and up.

What each file decides:

tier              what a tier must do and what it may raise
tiering           all tiers as the verbs see them: asked in order, flush, delete, drop
write_behind      which sealed blocks are copied down, when, and within which budget
promotion         cold blocks copied up on demand: threads, queue, retries
health            whether a tier counts as degraded, and when it is tried again
breaker           whether a service in another place is called at all
memory            a tier in this process's memory, for tests
faulty            faults with a seed around any tier, for tests
ssd               the SSD tier
redis             the Redis tier
"""
