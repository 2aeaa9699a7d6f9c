"""Floor 1: what a request asks for and how it ends."""
