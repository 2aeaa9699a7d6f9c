"""Floor 13: benchmarks; each prints what it did, and does a peer's work in the same run."""
