"""Floor 0: what every room may use: errors, decisions, registry, log, environment."""
