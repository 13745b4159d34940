"""The Redis tier: blocks shared between hosts, one string each.

What each file decides:

redis             put, get and delete; what happens when Redis fails
value             the 32 bytes in front of a block
location          settings and URL of the tier, checked once
connections       which node has which key; a connection is used by one call at a time
exchange          commands and answers, whole or the connection is closed
calls             names of blocks in Redis; breaker, health and counts around every call
asker             questions and deletes in the background
presence          what Redis was last heard to have, and for how long that counts
upkeep            trials of an open breaker, Redis's own numbers, drops
"""
