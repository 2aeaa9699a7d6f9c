"""A profile of the next steps, as a trace for Perfetto or chrome://tracing."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from headrace.base.errors import RequestError
from headrace.base.log import get_logger
from headrace.base.shown import shown

log = get_logger(__name__)


class StepProfiler:
    """At most one profile at a time. Writing the trace holds the engine up for seconds."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._path = Path()
        self._steps_left: int | None = None

    def start(self, folder: str, steps: int | None = None) -> dict[str, Any]:
        """Profile from now on.

        Args:
            folder: where the trace goes; made when missing.
            steps: stop after so many; `None`: when `stop` is called.

        Raises:
            RequestError: a profile runs already, the folder cannot be written, or a bad count.
        """
        if self._profile is not None:
            raise RequestError(f"A profile runs already, into {self._path}")
        if steps is not None and steps < 1:
            raise RequestError(f"steps is {steps}", remedy="Give a number from 1 on")
        name = f"headrace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.trace.json.gz"
        try:
            path = Path(folder).expanduser() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except (OSError, ValueError, RuntimeError) as error:  # a NUL; a user that there is not
            raise RequestError(
                f"The profile cannot be written to {shown(folder)}", why=str(error)
            ) from error
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._path, self._steps_left = path, steps
        self._profile = profile(activities=activities)
        self._profile.start()
        return {"path": str(path), "steps": steps}

    def stop(self) -> dict[str, Any]:
        """End the profile and write its trace.

        Raises:
            RequestError: none runs, or the trace cannot be written.
        """
        if self._profile is None:
            raise RequestError("No profile runs", remedy="Start one first")
        running, self._profile = self._profile, None
        running.stop()
        try:
            running.export_chrome_trace(str(self._path))
        except OSError as error:
            raise RequestError(
                f"The profile cannot be written to {self._path}", why=str(error)
            ) from error
        log.info("Profile written to %s", self._path)
        return {"path": str(self._path)}

    def after_step(self) -> None:
        """A step was taken; the last one that was asked for ends the profile."""
        if self._profile is None or self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self.close()

    def close(self) -> None:
        """Write the profile, if one runs, where nobody waits to hear how that went."""
        if self._profile is None:
            return
        try:
            self.stop()
        except RequestError as error:
            log.error("%s", error)
