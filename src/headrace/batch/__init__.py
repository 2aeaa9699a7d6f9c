"""Floor 3: what goes into a forward and what comes out of it."""
