"""Tools that need torch and a real model. Nothing here is imported by the core, the daemon or the client; each module says what it needs."""
