"""The only reader of `os.environ`: every variable, with what it does.

Unknown names with our prefix are reported by `unknown_variables`, so that a typing error is seen.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headrace.base.errors import ConfigError

PREFIX = "HEADRACE_"

VARIABLES = {
    "HEADRACE_CACHE": "~/.cache/headrace",  # folder for converted and assembled model files
    "HEADRACE_LOG_LEVEL": "warning",  # of the command line: debug, info, warning, error
}
"""Name -> default. Options of `headrace serve` have theirs besides: see `variable_of`."""


def cache_dir() -> Path:
    """Folder for files the engine makes (assembled GGUF parts, caches); created when missing.

    Raises:
        ConfigError: there can be no such folder.
    """
    with using_cache():
        path = Path(_read("HEADRACE_CACHE")).expanduser()
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def using_cache() -> Iterator[None]:
    """Around whatever reads or writes files below `cache_dir`.

    Raises:
        ConfigError: an OSError came out (read-only, full, no folder); names HEADRACE_CACHE.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: `~user` of nobody
        raise ConfigError(
            f"The cache folder {_read('HEADRACE_CACHE')} cannot be used",
            why=str(error),
            remedy="Set HEADRACE_CACHE to a folder that can be written and has room",
        ) from error


def log_level() -> str:
    level = _read("HEADRACE_LOG_LEVEL").lower()
    if level not in ("debug", "info", "warning", "error"):
        raise ConfigError(
            f"HEADRACE_LOG_LEVEL is {level!r}", remedy="Use debug, info, warning or error"
        )
    return level


def api_key() -> str:
    """The key that clients show to a server: HEADRACE_API_KEY, else OPENAI_API_KEY, else ""."""
    return os.environ.get("HEADRACE_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""


def options(names: Iterable[str]) -> dict[str, str]:
    """Options that are set in the environment, as HEADRACE_ and their name in capitals."""
    return {name: value for name in names if (value := os.environ.get(variable_of(name)))}


def variable_of(option: str) -> str:
    """HEADRACE_MAX_MODEL_LEN for max_model_len"""
    return PREFIX + option.upper()


def unknown_variables(options: Iterable[str] = ()) -> list[str]:
    """Names in the environment that carry our prefix and mean nothing to us.

    Args:
        options: names of options that a program reads from the environment.
    """
    known = {*VARIABLES, *map(variable_of, options)}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


def all_variables() -> dict[str, str]:
    """The whole environment, secrets included: for reports that choose what they show."""
    return dict(os.environ)


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: ours, with `changes`."""
    return {**os.environ, **changes}


def _read(name: str) -> str:
    return os.environ.get(name) or VARIABLES[name]
