"""Logging: one logger tree under `headrace`, quiet unless somebody listens."""

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def log_to_stderr(level: str) -> None:
    """Send the engine's log to stderr; the command line calls this once."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
