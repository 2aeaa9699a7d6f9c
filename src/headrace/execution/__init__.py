"""Floor 8: the ways to run a forward, and the table that picks one."""
