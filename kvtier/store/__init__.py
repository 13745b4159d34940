"""The memory tier: who may use which bytes, and who goes first when there are too few."""
