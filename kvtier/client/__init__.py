"""What an engine holds: `kvtier.Client`, its two transports, and the mapping of the arena."""
