"""Floor 8: weights into the module tree."""
