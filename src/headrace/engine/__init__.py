"""Floor 11: scheduler, worker and text joined into one engine."""
