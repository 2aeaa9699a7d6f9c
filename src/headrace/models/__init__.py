"""Floor 7: model families: what a config says, and the module tree that goes with it."""
