"""Logging: one logger tree under `headrace`, quiet unless somebody listens."""

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def log_to_stderr(level: str, *, process: str = "") -> None:
    """Send the log to stderr; a program calls this once.

    Args:
        process: put before every line, where several processes write to one stderr.
    """
    handler = logging.StreamHandler()
    prefix = f"[{process}] " if process else ""
    handler.setFormatter(
        logging.Formatter(f"{prefix}%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
