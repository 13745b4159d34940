"""What both ends of a socket share: wire formats, verbs, codes, deadlines, limits, and where the daemon listens.

What each file decides:

frames            the wire format of the Unix transport, numbers of the verbs, the largest frame
rpc               the wire format over gRPC: methods, chunks, status codes, keep-alive, sizes of messages
fields            protobuf's numbers and fields, which frames and chunks are built of
limits            default deadlines, and how much one call may ask for
stops             why an answer ends where it does: codes, and their texts for people (errors: kvtier/errors.py)
addresses         the default socket, and the gRPC socket beside it
backing           madvise and mmap for both ends of the arena
v1                generated messages of proto/kvtier/v1/kvtier.proto
"""
