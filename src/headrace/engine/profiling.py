"""A profile of the next steps, as a trace for Perfetto or chrome://tracing."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from headrace.base.errors import RequestError
from headrace.base.folders import made_folder
from headrace.base.log import get_logger
from headrace.base.shown import shown
from headrace.engine.interrupts import interrupts_held
from headrace.observers.spans import Spans

log = get_logger(__name__)

PREFILL, DECODE = STAGES = ("prefill", "decode")
CPU, GPU, CUDA_PROFILER = ACTIVITIES = ("CPU", "GPU", "CUDA_PROFILER")
MAX_PREFIX = 100  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is still to be profiled.

    Attributes:
        steps: how many; `None`: until it is stopped. first: number of the step to begin with.
        files: stage -> its trace; the stage `None` takes any step.
    """

    steps: int | None
    first: int
    files: dict[str | None, Path]
    activities: tuple[str, ...]
    with_stack: bool
    record_shapes: bool


class StepProfiler:
    """At most one profile at a time. Writing the trace holds the engine up for seconds.

    A profile of a stage begins with the first step of that stage and ends after as many in a row as
    were asked for, or with a step of the other stage. Steps with prompt tokens are of the stage
    "prefill", whatever else they hold.

    Args:
        spans: shown while a profile runs.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._asked: Asked | None = None
        self._profile: Recording | None = None
        self._stage: str | None = None
        self._taken = 0
        self._written: list[str] = []

    def start(
        self,
        folder: str | os.PathLike[str],
        steps: int | None = None,
        *,
        stages: Iterable[str] = (),
        start_step: int | None = None,
        activities: Iterable[str] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        prefix: str = "",
    ) -> dict[str, Any]:
        """Profile from now on, or when the time has come.

        Args:
            folder: where the traces go; made when missing.
            steps: stop after so many; `None`: when `stop` is called.
            stages: "prefill", "decode" or both, with a trace each; empty: whatever comes.
            start_step: number of the step to begin with; `None`: the next.
            activities: of "CPU" and "GPU" (`None`: what is there), or "CUDA_PROFILER" alone, which
                writes no trace: it opens NVTX ranges and starts the capture of Nsight Systems.
            with_stack: Python's stack for every operator. record_shapes: shapes of its inputs.
            prefix: of the files' names.

        Returns: "paths" by stage ("all" where none was named), and "path", the first of them.

        Raises:
            RequestError: a profile runs already, here or elsewhere in this process, the folder
                cannot be written, or an argument has no meaning here.
        """
        if self._asked is not None:
            running = ", ".join(map(str, self._asked.files.values()))
            raise RequestError(
                f"A profile runs already, into {running}", remedy="Stop it, or wait for its end"
            )
        _check_number("steps", steps, 1)
        _check_number("start_step", start_step, 0)
        for name, value in (("with_stack", with_stack), ("record_shapes", record_shapes)):
            if not isinstance(value, bool):
                raise RequestError(f"{name} is {shown(value)}", remedy="Allowed: True or False")
        named = _some("stages", stages, STAGES)
        if len(named) > 1 and steps is None:
            raise RequestError(
                "A profile of both stages needs a number of steps", remedy="Give steps"
            )
        chosen = _activities(activities)
        files = _files(folder, prefix, named)
        self._asked = Asked(
            steps=steps,
            first=start_step or 0,
            files=files,
            activities=chosen,
            with_stack=with_stack,
            record_shapes=record_shapes,
        )
        self._written = []
        if not named and start_step is None:
            try:
                with interrupts_held():
                    self._begin(None)
            except RequestError:
                self._forget()
                raise
        paths = {stage or "all": str(path) for stage, path in files.items()}
        return {"path": next(iter(paths.values())), "paths": paths, "steps": steps}

    def stop(self) -> dict[str, Any]:
        """End the profile and write its trace.

        Raises:
            RequestError: none runs, none of its steps came, or the trace cannot be written.
        """
        asked = self._asked
        if asked is None:
            raise RequestError("No profile runs", remedy="Start one first")
        with interrupts_held():
            try:
                if self._profile is not None:
                    self._end()
            finally:
                self._forget()
        if not self._written:
            raise RequestError("No step of the profile came", why="nothing was written")
        return {"path": self._written[0], "paths": list(self._written)}

    def before_step(self, number: int, is_prefill: bool) -> None:
        """Step `number` is about to be built."""
        asked = self._asked
        if asked is None:
            return
        stage = PREFILL if is_prefill else DECODE
        if self._profile is not None and self._stage not in (None, stage):
            self._close_part()
            asked = self._asked
        if asked is not None and self._profile is None and number >= asked.first:
            mine = stage if stage in asked.files else None
            if mine in asked.files:
                self._begin_or_forget(mine)
        if self._profile is not None:
            self._taken += 1

    def after_turn(self) -> None:
        """A turn of the loop is over: the last step that was asked for ends the profile."""
        asked = self._asked
        if asked and self._profile and asked.steps and self._taken >= asked.steps:
            self._close_part()

    def close(self) -> None:
        """Write the profile, if one runs, where nobody waits to hear how that went."""
        if self._asked is None:
            return
        with interrupts_held():
            if self._profile is not None:
                self._close_part()
            self._forget()

    # ---- inside

    def _begin_or_forget(self, stage: str | None) -> None:
        """The step that is about to run has nothing to do with it."""
        try:
            self._begin(stage)
        except RequestError as error:
            log.error("%s", error)
            self._forget()

    def _begin(self, stage: str | None) -> None:
        """Raises `RequestError` where somebody else profiles: torch has one at a time for a
        process, and ends it where another begins."""
        asked = self._asked
        assert asked is not None
        self._stage, self._taken = stage, 0
        if CUDA_PROFILER in asked.activities:
            self._profile = _Capture()
            self._spans.show(torch.cuda.nvtx.range)
        elif torch_profiler._is_profiler_enabled:
            raise RequestError(
                "The profile cannot begin",
                why="another of torch runs in this process",
                remedy="End that one first",
            )
        else:
            known = {CPU: ProfilerActivity.CPU, GPU: ProfilerActivity.CUDA}
            self._profile = profile(
                activities=[known[each] for each in asked.activities],
                with_stack=asked.with_stack,
                record_shapes=asked.record_shapes,
                # whoever steps the engine, and whoever stops this, may be another thread
                experimental_config=torch._C._profiler._ExperimentalConfig(
                    profile_all_threads=True
                ),
            )
            self._spans.show(record_function)
        self._profile.start()

    def _end(self) -> None:
        """Stop what runs and write it. Raises `RequestError` where it cannot be written."""
        asked, running = self._asked, self._profile
        assert asked is not None
        assert running is not None
        self._profile = None
        self._spans.show(None)
        path = asked.files.pop(self._stage)
        if isinstance(running, profile) and not torch_profiler._is_profiler_enabled:
            _remove(path)
            raise RequestError(
                "The profile is lost", why="another of torch, in this process, has ended it"
            )
        running.stop()
        try:
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            _remove(path)  # half a trace is none
            raise RequestError(
                f"The profile cannot be written to {path}", why=str(error)
            ) from error
        self._written.append(str(path))
        log.info("Profile of %d steps written to %s", self._taken, path)

    def _close_part(self) -> None:
        try:
            self._end()
        except RequestError as error:
            log.error("%s", error)
        if self._asked is not None and not self._asked.files:
            self._forget()

    def _forget(self) -> None:
        """Nothing is asked any more; files of steps that never came go."""
        if self._asked is not None:
            for path in self._asked.files.values():
                _remove(path)
        self._asked = None


class Recording(Protocol):
    """What torch's profile does."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def export_chrome_trace(self, path: str) -> None: ...


class _Capture:
    """Nsight Systems' capture in the place of a profile of our own."""

    def __init__(self) -> None:
        self._runtime = torch.cuda.cudart()

    def start(self) -> None:
        self._runtime.cudaProfilerStart()

    def stop(self) -> None:
        torch.cuda.synchronize()
        self._runtime.cudaProfilerStop()

    def export_chrome_trace(self, path: str) -> None:
        """The trace is the tool's."""
        Path(path).unlink()


def _check_number(name: str, value: object, least: int) -> None:
    """Raises `RequestError` for what is neither `None` nor a whole number from `least` on."""
    if value is not None and (type(value) is not int or value < least):
        raise RequestError(f"{name} is {shown(value)}", remedy=f"Give a number from {least} on")


def _some(name: str, asked: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """Each once. Raises `RequestError` for what is no list of known ones."""
    remedy = f"Give a list of some of {', '.join(known)}"
    if not isinstance(asked, list | tuple):
        raise RequestError(f"{name} is {shown(asked)}", remedy=remedy)
    if unknown := [each for each in asked if not isinstance(each, str) or each not in known]:
        raise RequestError(f"{name} has {shown(unknown[0])}", remedy=remedy)
    return tuple(dict.fromkeys(asked))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # its folder has changed meanwhile
        log.warning("%s cannot be removed: %s", path, error)


def _activities(asked: Iterable[str] | None) -> tuple[str, ...]:
    """Raises `RequestError` for what this machine or this version cannot watch."""
    on_gpu = torch.cuda.is_available()
    if asked is None:
        return (CPU, GPU) if on_gpu else (CPU,)
    named = _some("activities", asked, ACTIVITIES)
    if not named:
        raise RequestError("activities is empty", remedy=f"Use some of {', '.join(ACTIVITIES)}")
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
