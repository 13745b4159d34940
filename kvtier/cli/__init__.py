"""`kvtier`: what an operator or a script says to a daemon, through the client library alone. docs/cli.md is its page."""
