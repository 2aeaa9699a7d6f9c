"""Floor 12: the HTTP server."""
