"""The process `kvtier-server`: sockets, gRPC, sessions, verbs, access, settings, metrics and its life.

What each file decides:

main              flags, signals, exit codes
lifecycle         the order of a start and of a stop; which parts are built
settings          every setting: name, default, meaning, how its value is read, what goes together, who a Unix peer is
verbs             each verb: its checks, its answer, and `HANDLERS`: which role may call what
sessions          what a client holds, and what happens when it dies: limbo, and slots that come back
unix              the Unix transport: accept, hello, frames; limits of sockets
grpc              the gRPC transport: methods, callers, limits
streams           put and get with bytes, over gRPC
in_flight         gRPC calls under way, and when they are cut
access            tokens and certificates, read anew when their files change
socket_claim      one daemon a socket path
http              /metrics, /live and /ready
metrics           names and labels of everything exported
meters            seconds, errors and bytes of calls
logs              the form of log lines
systemd           READY, STOPPING and the watchdog
malloc            how the C library returns memory
"""
