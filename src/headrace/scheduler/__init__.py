"""Floor 10: who runs when, and on which pages."""
