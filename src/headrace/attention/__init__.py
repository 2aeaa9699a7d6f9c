"""Floor 5: attention backends, their registry and the selection among them."""
