"""Look-ups in the metadata of one architecture, with errors that name the key."""

from typing import Any

import numpy as np

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint.gguf_file import GgufFile


class ArchitectureKeys:
    """The metadata below `<architecture>.`; a missing one is a CheckpointError naming it."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._architecture = file, architecture

    def get(self, name: str) -> Any:
        return self._file.metadata.get(f"{self._architecture}.{name}")

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(
                f"{self._file.path} lacks the metadata key {self._architecture}.{name}"
            )
        return value

    def count(self, name: str, most: int | None = None) -> int:
        """A required positive integer, at most `most`, that is the same for all layers."""
        value = self.require(name)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise UnsupportedError(
                    f"{self._file.path}: {self._architecture}.{name} differs between layers",
                    remedy="Supported: models whose layers are all of one shape",
                )
            value = int(value[0])
        if not isinstance(value, int) or value <= 0 or (most and value > most):
            raise CheckpointError(f"{self._file.path}: {self._architecture}.{name} is {value!r}")
        return value

    def names(self) -> list[str]:
        prefix = f"{self._architecture}."
        return [key.removeprefix(prefix) for key in self._file.metadata if key.startswith(prefix)]
