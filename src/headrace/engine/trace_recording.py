"""What records a profile: torch's own profiler, or Nsight Systems outside."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from headrace.base.errors import RequestError
from headrace.engine.profile_request import CPU, CUDA_PROFILER, GPU, ProfileRequest


class Recording(Protocol):
    """One recording, from `start` to `stop`."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """Within: what runs has this name in the recording."""

    def start(self) -> None:
        """Raises `RequestError` where somebody else records."""

    def stop(self) -> None:
        """Raises `RequestError` where somebody else has ended it."""

    def write(self, path: Path) -> None:
        """Write the trace; raises OSError or RuntimeError where that fails."""


def recording_of(asked: ProfileRequest) -> Recording:
    return NsightCapture() if CUDA_PROFILER in asked.activities else TorchProfile(asked)


class TorchProfile:
    """torch has one at a time for a process, and ends it where another begins."""

    def __init__(self, asked: ProfileRequest) -> None:
        known = {CPU: ProfilerActivity.CPU, GPU: ProfilerActivity.CUDA}
        self._profile = profile(
            activities=[known[each] for each in asked.activities],
            with_stack=asked.with_stack,
            record_shapes=asked.record_shapes,
            # whoever steps the engine, and whoever stops this, may be another thread
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )

    def span(self, name: str) -> AbstractContextManager[object]:
        return record_function(name)

    def start(self) -> None:
        if torch_profiler._is_profiler_enabled:
            raise RequestError(
                "The profile cannot begin",
                why="another of torch runs in this process",
                remedy="End that one first",
            )
        self._profile.start()

    def stop(self) -> None:
        if not torch_profiler._is_profiler_enabled:
            raise RequestError(
                "The profile is lost", why="another of torch, in this process, has ended it"
            )
        self._profile.stop()

    def write(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))


class NsightCapture:
    """Opens NVTX ranges and starts the capture of Nsight Systems, whose the trace is."""

    def __init__(self) -> None:
        self._runtime = torch.cuda.cudart()

    def span(self, name: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(name)

    def start(self) -> None:
        self._runtime.cudaProfilerStart()

    def stop(self) -> None:
        torch.cuda.synchronize()
        self._runtime.cudaProfilerStop()

    def write(self, path: Path) -> None:
        path.unlink()
