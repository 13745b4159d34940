"""What both ends of a socket share: frames, verbs, codes, limits, deadlines, and where the daemon listens.

What each file decides:

frames            the Unix transport's frames, numbers of the verbs, the largest frame
rpc               gRPC's methods, chunks, status codes, keep-alive and message limits
limits            how much one call may ask for, and the default deadlines
stops             why an answer ends where it does: codes, and their texts for people
addresses         the default socket, and the gRPC socket beside it
backing           madvise and mmap for both ends of the arena
v1                generated messages of proto/kvtier/v1/kvtier.proto
"""
