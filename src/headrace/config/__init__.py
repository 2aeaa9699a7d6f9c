"""Floor 1: what was asked, what the model is, what the machine is, what was decided."""
