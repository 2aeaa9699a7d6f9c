"""Models of the Hugging Face hub: the one user of huggingface_hub."""

import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headrace.base.errors import NotFoundError, UnsupportedError
from headrace.base.log import get_logger
from headrace.checkpoint.folder_files import SUPPORTED_FORMATS

logger = get_logger(__name__)

_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"(?P<repository>{_PART}/{_PART})(?:/(?P<file>[\w./-]+\.gguf))?")

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")
# config, generation and tokenizer files; code is never fetched.
_SMALL_FILES = ("*.json", "*.jinja", *_TOKENIZERS, "merges.txt")
_USUAL_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
_PICKLED = ("*.bin", "*.pt", "*.pth")
_SECONDS_TO_ANSWER = 10.0
_LONGEST_REASON = 300  # characters


def is_hub_id(name: str) -> bool:
    """`owner/name`, or `owner/name/file.gguf`."""
    return _HUB_ID.fullmatch(name) is not None


def resolve_hub_model(name: str, revision: str | None, *, weights: bool = True) -> Path:
    """The folder (or .gguf file) of a hub model, downloaded when it is not in the local cache.

    Args:
        weights: False leaves them out where the tokenizer is in files of its own.

    Raises:
        NotFoundError: no such repository, the hub is out of reach and the cache lacks it, or the
            files cannot be downloaded (not permitted, interrupted, no room).
        UnsupportedError: the repository holds neither safetensors nor one .gguf.
    """
    match = _HUB_ID.fullmatch(name)
    assert match is not None, "the caller asked is_hub_id"
    repository, file = match["repository"], match["file"]
    try:
        listing = _list_files(repository, revision)
    except Exception as error:  # network errors of several libraries; the cache decides below
        return _from_cache(name, repository, file, revision, error)
    wanted = _choose_files(repository, listing, file, weights)
    return _download(name, repository, revision, wanted)


def _list_files(repository: str, revision: str | None) -> list[str]:
    # Imported late: a path or a short name needs no hub.
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision, timeout=_SECONDS_TO_ANSWER)
    return [sibling.rfilename for sibling in info.siblings or ()]


def _choose_files(
    repository: str, listing: list[str], file: str | None, weights: bool
) -> list[str]:
    """What to download; weights in one format only."""
    if file is not None:
        if file not in listing:
            raise NotFoundError(
                f"{repository} holds no {file}", remedy=f"Its .gguf files: {_gguf(listing)}"
            )
        return [file]
    small = [name for name in listing if "/" not in name and _matches(name, _SMALL_FILES)]
    if not weights and any(_matches(name, _TOKENIZERS) for name in small):
        return small
    safetensors = _safetensors(listing)
    if safetensors:
        return small + safetensors
    gguf = _gguf(listing)
    if len(gguf) == 1:
        return gguf
    if gguf:
        raise UnsupportedError(
            f"{repository} holds {len(gguf)} .gguf files",
            remedy=f"Name one as {repository}/FILE: {', '.join(gguf)}",
        )
    pickled = [name for name in listing if _matches(name, _PICKLED)]
    raise UnsupportedError(
        f"{repository} holds "
        + (f"only pickled weights ({pickled[0]})" if pickled else "no weights"),
        remedy=SUPPORTED_FORMATS,
    )


def _download(name: str, repository: str, revision: str | None, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=files))
    except Exception as error:  # of network, disk and permissions, from several libraries
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise NotFoundError(
            f"Model {name!r} cannot be downloaded",
            why=f"{type(error).__name__}: {reason}",
            remedy=f"Accept its conditions on the hub's page of {repository}, and set HF_TOKEN"
            if isinstance(error, GatedRepoError)
            else "Try again, it goes on where it ended, or download the model and give its folder",
        ) from error
    gguf = [name for name in files if name.endswith(".gguf")]
    return folder / gguf[0] if gguf else folder


def _from_cache(
    name: str, repository: str, file: str | None, revision: str | None, error: Exception
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        raise _not_found(
            name,
            "It is no existing path and no short name; the hub has no such repository or revision, "
            "or wants you to log in",
        ) from error
    if isinstance(error, HFValidationError):
        raise _not_found(name, f"It is no existing path and no hub id: {error}") from error
    try:
        cached: Any = snapshot_download(repository, revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        raise _not_found(
            name,
            "It is no existing path and no short name; the hub is out of reach "
            f"({type(error).__name__}: {error}) and the local hub cache does not hold it",
        ) from error
    path = Path(cached) / file if file else Path(cached)
    if not os.path.exists(path):  # false, not an error, for a name too long
        raise _not_found(name, f"The hub is out of reach and {cached} lacks {file}") from error
    logger.warning("the hub is out of reach (%s); using %s", error, path)
    return path


def _not_found(name: str, why: str) -> NotFoundError:
    return NotFoundError(
        f"Model {name!r} not found",
        why=why,
        remedy="Check the name, or download the model and give its folder",
    )


def _safetensors(listing: list[str]) -> list[str]:
    """The weights transformers would load; copies under other names are left out."""
    found = [name for name in listing if fnmatch(name, "*.safetensors") and "/" not in name]
    usual = [name for name in found if _matches(name, _USUAL_WEIGHTS)]
    return usual or found


def _gguf(listing: list[str]) -> list[str]:
    return [name for name in listing if fnmatch(name, "*.gguf")]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
