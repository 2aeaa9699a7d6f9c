"""A profile of the next steps, as a trace for Perfetto or chrome://tracing."""

import os
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.log import get_logger
from headrace.engine.interrupts import interrupts_held
from headrace.engine.profile_request import (
    DECODE,
    PREFILL,
    ProfileRequest,
    checked_request,
    remove,
)
from headrace.engine.trace_recording import Recording, recording_of
from headrace.observers.spans import Spans

log = get_logger(__name__)


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
        self._asked: ProfileRequest | None = None
        self._recording: Recording | None = None
        self._stage: str | None = None
        self._taken = 0
        self._written: list[str] = []

    def start(
        self, folder: str | os.PathLike[str], steps: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Profile from now on, or when the time has come.

        Args:
            folder, steps, options: see `checked_request`.

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
        self._asked = asked = checked_request(folder, steps, **options)
        self._written = []
        if asked.begins_now:
            try:
                with interrupts_held():
                    self._begin(None)
            except RequestError:
                self._forget()
                raise
        paths = {stage or "all": str(path) for stage, path in asked.files.items()}
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
                if self._recording is not None:
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
        if self._recording is not None and self._stage not in (None, stage):
            self._close_part()
            asked = self._asked
        if asked is not None and self._recording is None and number >= (asked.first or 0):
            mine = stage if stage in asked.files else None
            if mine in asked.files:
                self._begin_or_forget(mine)
        if self._recording is not None:
            self._taken += 1

    def after_turn(self) -> None:
        """A turn of the loop is over: the last step that was asked for ends the profile."""
        asked = self._asked
        if asked and self._recording and asked.steps and self._taken >= asked.steps:
            self._close_part()

    def close(self) -> None:
        """Write the profile, if one runs, where nobody waits to hear how that went."""
        if self._asked is None:
            return
        with interrupts_held():
            if self._recording is not None:
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
        """Raises `RequestError` where somebody else in this process profiles."""
        asked = self._asked
        assert asked is not None
        self._stage, self._taken = stage, 0
        recording = recording_of(asked)
        recording.start()
        self._recording = recording
        self._spans.show(recording.span)

    def _end(self) -> None:
        """Stop what runs and write it. Raises `RequestError` where it cannot be written."""
        asked, recording = self._asked, self._recording
        assert asked is not None
        assert recording is not None
        self._recording = None
        self._spans.show(None)
        path = asked.files.pop(self._stage)
        try:
            recording.stop()
            recording.write(path)
        except RequestError:
            remove(path)
            raise
        except (OSError, RuntimeError) as error:
            remove(path)  # half a trace is none
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
                remove(path)
        self._asked = None
