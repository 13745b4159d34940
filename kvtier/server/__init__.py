"""The process `kvtier-server`: sockets, gRPC, sessions, verbs, access, settings, metrics and its life."""
