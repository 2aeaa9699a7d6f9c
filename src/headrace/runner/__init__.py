"""Floor 9: who a runner is, what was decided, and the execution shell of one device."""
