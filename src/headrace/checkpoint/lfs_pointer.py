"""Git LFS: a clone made without it holds a few lines of text in place of each large file."""

from pathlib import Path

from headrace.base.errors import CheckpointError

_START = b"version https://git-lfs"


def refuse_pointer(file: Path) -> None:
    """Raise `CheckpointError` for such lines; asked about files that cannot be read otherwise."""
    with file.open("rb") as stream:
        if stream.read(len(_START)) == _START:
            raise CheckpointError(
                f"{file} is a pointer of Git LFS, in place of the file itself",
                remedy="Run git lfs install and git lfs pull in its folder, or download the file",
            )
