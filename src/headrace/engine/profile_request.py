"""What is to be profiled, checked, and the files that the traces will be."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from headrace.base.errors import RequestError
from headrace.base.folders import made_folder
from headrace.base.log import get_logger
from headrace.base.shown import shown
from headrace.request.checks import at_least, some_of, switch

log = get_logger(__name__)

PREFILL, DECODE = STAGES = ("prefill", "decode")
CPU, GPU, CUDA_PROFILER = ACTIVITIES = ("CPU", "GPU", "CUDA_PROFILER")
MAX_PREFIX = 100  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What is still to be profiled.

    Attributes:
        steps: how many; `None`: until it is stopped.
        first: number of the step to begin with; `None`: the next.
        files: stage -> its trace; the stage `None` takes any step.
    """

    steps: int | None
    first: int | None
    files: dict[str | None, Path]
    activities: tuple[str, ...]
    with_stack: bool
    record_shapes: bool

    @property
    def begins_now(self) -> bool:
        """It waits neither for a stage nor for a step."""
        return self.first is None and None in self.files


def checked_request(
    folder: str | os.PathLike[str],
    steps: int | None = None,
    *,
    stages: Iterable[str] = (),
    start_step: int | None = None,
    activities: Iterable[str] | None = None,
    with_stack: bool = False,
    record_shapes: bool = False,
    prefix: str = "",
) -> ProfileRequest:
    """What was asked; empty files stand in the place of the traces.

    Args:
        folder: where the traces go; made when missing.
        steps: stop after so many; `None`: when the profile is stopped.
        stages: "prefill", "decode" or both, with a trace each; empty: whatever comes.
        start_step: number of the step to begin with; `None`: the next.
        activities: of "CPU" and "GPU" (`None`: what is there), or "CUDA_PROFILER" alone, which
            writes no trace: it opens NVTX ranges and starts the capture of Nsight Systems.
        with_stack: Python's stack for every operator. record_shapes: shapes of its inputs.
        prefix: of the files' names.

    Raises:
        RequestError: one has no meaning here, or the folder cannot be written.
    """
    at_least("steps", steps, 1)
    at_least("start_step", start_step, 0)
    switch("with_stack", with_stack)
    switch("record_shapes", record_shapes)
    named = some_of("stages", stages, STAGES, may_be_empty=True)
    if len(named) > 1 and steps is None:
        raise RequestError("A profile of both stages needs a number of steps", remedy="Give steps")
    chosen = _activities(activities)
    files = _files(folder, prefix, named)
    return ProfileRequest(
        steps=steps,
        first=start_step,
        files=files,
        activities=chosen,
        with_stack=with_stack,
        record_shapes=record_shapes,
    )


def _activities(asked: Iterable[str] | None) -> tuple[str, ...]:
    """Raises `RequestError` for what this machine or this version cannot watch."""
    on_gpu = torch.cuda.is_available()
    if asked is None:
        return (CPU, GPU) if on_gpu else (CPU,)
    named = some_of("activities", asked, ACTIVITIES)
    if not on_gpu and named != (CPU,):
        raise RequestError(
            f"activities is {', '.join(named)}", why="there is no GPU here", remedy="Use CPU"
        )
    if CUDA_PROFILER in named and len(named) > 1:
        raise RequestError("CUDA_PROFILER goes with no other activity", remedy="Name it alone")
    return named


def _files(
    folder: str | os.PathLike[str], prefix: str, stages: tuple[str, ...]
) -> dict[str | None, Path]:
    """Empty files in the place of the traces, so that what cannot be written shows now."""
    is_part = isinstance(prefix, str) and "/" not in prefix and prefix.isprintable()
    if not is_part or len(prefix) > MAX_PREFIX:
        raise RequestError(
            f"prefix is {shown(prefix)}",
            remedy=f"Give up to {MAX_PREFIX} characters of a file's name",
        )
    place = made_folder(folder, "The profile")
    name = f"{prefix}headrace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    files: dict[str | None, Path] = {}
    try:
        for stage in stages or (None,):
            files[stage] = _new_file(place, f"{name}-{stage}" if stage else name)
    except OSError as error:
        raise RequestError(
            f"The profile cannot be written to {shown(folder)}", why=str(error)
        ) from error
    return files


def _new_file(place: Path, name: str) -> Path:
    """Two profiles may begin in the same second."""
    for number in count():
        path = place / f"{name}{f'-{number}' if number else ''}.trace.json.gz"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("numbers do not end")


def remove(path: Path) -> None:
    """Take away the file of a trace that will not come."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # its folder has changed meanwhile
        log.warning("%s cannot be removed: %s", path, error)
