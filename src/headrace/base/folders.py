"""Folders on which somebody asks us to write."""

import os
from pathlib import Path

from headrace.base.errors import RequestError
from headrace.base.shown import shown


def made_folder(asked: object, what: str) -> Path:
    """The folder, made when missing.

    Args:
        what: shall be written there, such as "The profile".

    Raises:
        RequestError: it names no folder, or one that cannot be made or written to.
    """
    refusal = f"{what} cannot be written to {shown(asked)}"
    if not isinstance(asked, str | os.PathLike) or not str(asked).strip():
        raise RequestError(refusal, why="that names no folder", remedy="Give the path of a folder")
    try:
        folder = Path(os.fsdecode(asked)).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL; a user that there is not
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RequestError(refusal, why=why, remedy="Name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(
            refusal, why="this process may not write there", remedy="Name another folder"
        )
    return folder
