"""Files that appear whole or not at all, whoever else writes the same one."""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.base.log import get_logger

logger = get_logger(__name__)

_SECONDS_OF_A_DAY = 86400


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A place beside `path` to write at; at the end the file there takes the name, and where
    anything is raised it is removed.

    The file is made by whoever writes: one of `tempfile` nobody else may read.
    """
    unfinished = path.with_name(f"{_ours(path)}{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def remove_left_behind(path: Path) -> None:
    """Remove unfinished files of runs that were killed: of dead processes of this host, or a day
    old."""
    for file in path.parent.iterdir():
        if not file.name.startswith(f".{path.name}."):
            continue
        with suppress(FileNotFoundError):  # another process ends what it writes at any moment
            if _is_left_behind(file, path):
                logger.info("removing %s, which a killed run left behind", file)
                file.unlink()


def _is_left_behind(file: Path, path: Path) -> bool:
    process = file.name.removeprefix(_ours(path)).partition(".")[0]
    is_ours = file.name.startswith(_ours(path)) and process.isdecimal()
    is_dead = is_ours and not _runs(int(process))
    return is_dead or time.time() - file.lstat().st_mtime > _SECONDS_OF_A_DAY


def _ours(path: Path) -> str:
    """How names of unfinished files of this host begin; the process follows."""
    return f".{path.name}.{socket.gethostname()}."


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True  # somebody else's
    except (ProcessLookupError, OverflowError):
        return False
    return True
