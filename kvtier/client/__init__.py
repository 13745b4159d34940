"""What an engine holds: `kvtier.Client`, its two transports, and the mapping of the arena.

What each file decides:

api               `Client`: every call, its default deadline, what it raises and what it degrades to
answers           what calls return; how long lists are split
unix              leases, fills, puts and gets in the mapped arena
unix_socket       one socket to a daemon: the hello, calls in order
connection        sockets and session, and what happens when the daemon goes and comes back
mapping           the arena mapped, and unmapped when the daemon goes
batch             many blocks copied while the next calls are on their way
copier            large copies, shared with a helper thread
grpc              leases, fills, puts and gets over gRPC, checked
grpc_channel      the channel, credentials, what gRPC's failures are called, forks
torch_views       parts and scales of a body as torch tensors
"""
