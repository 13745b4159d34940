"""The daemon: configuration, command line and life cycle around the service."""
