"""What connectors share, whatever the engine. No engine is imported here."""
