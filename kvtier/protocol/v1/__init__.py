"""Generated from proto/kvtier/v1/kvtier.proto by `make proto`. Do not edit."""
