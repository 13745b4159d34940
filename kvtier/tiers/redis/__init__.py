"""The Redis tier: blocks shared between hosts, one string each."""
