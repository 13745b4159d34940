"""What lies below memory: the contract of a tier, and copying down and up.

What each file decides:

tier              what a tier must do and what it may raise
tiering           all tiers as the verbs see them: asked in order, flush, delete, drop
write_behind      which sealed blocks are copied down, when, and within which budget
promotion         cold blocks copied up on demand: threads, queue, retries
health            whether a tier counts as degraded, and when it is tried again
breaker           whether a service in another place is called at all
ssd               the SSD tier
redis             the Redis tier
"""
