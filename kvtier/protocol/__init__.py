"""What both ends of a socket share: frames, verbs, codes, limits, deadlines, and where the daemon listens."""
