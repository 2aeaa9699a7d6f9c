"""A GPU of compute capability 9.0 that is not there, for processes that do not interpret.

Triton compiles for it, and launches reach it and end there: what kernels would have written is not.
"""

import threading
from contextlib import nullcontext
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from headrace.kernels import support_triton

SHARED = 227 * 1024  # bytes a block may have
MULTIPROCESSORS = 132


class FakedGpu:
    """Stands in for Triton's driver.

    Attributes:
        loaded, launched: names of kernels, in their order.
    """

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED}

    def load_binary(self, name: str, *_: Any) -> tuple[object, int, int, int, int]:
        self.loaded.append(name)
        return object(), 0, 0, 0, 1024

    def unload_module(self, *_: Any) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """As in Triton 3.6, where threads that make launchers can take each other's."""
        own = threading.current_thread() is threading.main_thread()
        return lambda *_: self.launched.append(source.name if own else "another's launcher")


def install() -> FakedGpu:
    """To be called before any kernel file is imported: tensors of the CPU pass for the GPU's."""
    gpu = FakedGpu()
    driver.set_active(gpu)
    support_triton.triton_available = lambda device_type=None: None
    support_triton.has_dependent_launch = lambda device: True
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    assert not triton.knobs.runtime.interpret
    return gpu
