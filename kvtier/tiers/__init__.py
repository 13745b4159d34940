"""What lies below memory: the protocol of a tier, and copying down and up."""
