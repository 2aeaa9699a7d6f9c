"""Which machine this is: `Hardware` of the device that will run, by asking torch and the system."""

import os
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from headrace.base.errors import ConfigError, UnsupportedError
from headrace.config.hardware import ASSUMED_HARDWARE, Hardware
from headrace.memory.host_memory import CGROUP, MEMINFO, total_host_bytes
from headrace.runner.choices.cpu_graph import COMPILER

KERNEL_PACKAGES = ("triton", "flashinfer", "sgl_kernel")
DEVICES = ("auto", "cuda", "cpu")


def detect(device: str) -> Hardware:
    """The hardware behind a device name.

    Args:
        device: auto (cuda if usable, else cpu), cuda or cpu.

    Raises:
        UnsupportedError: another device name.
        ConfigError: cuda was asked and no CUDA device is usable.
    """
    if device not in DEVICES:
        remedy = f"Use one of: {', '.join(DEVICES)}"
        if device.startswith(("cuda:", "rocm", "hip")):
            remedy = "Use cuda, and CUDA_VISIBLE_DEVICES to choose which one"
        raise UnsupportedError(
            f"Device {device!r} is not supported",
            why="this version runs on cuda and cpu devices only",
            remedy=remedy,
        )
    usable = torch.cuda.is_available()
    if device == "cuda" and not usable:
        raise ConfigError(
            "device is 'cuda' but no CUDA device is usable",
            why=_why_no_cuda(),
            remedy="Use device cpu or auto, or install a CUDA build of torch and its driver",
        )
    return _cpu() if device == "cpu" or not usable else _gpu()


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch finds no device or no working driver"


def _gpu() -> Hardware:
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    sheet = known_gpu(properties.name, properties.total_memory)
    return Hardware(
        name=properties.name,
        platform="cuda" if torch.version.hip is None else "rocm",
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        bandwidth=0.0 if sheet is None else sheet.bandwidth,
        matrix_rate=0.0 if sheet is None else sheet.matrix_rate,
        units=properties.multi_processor_count,
        packages=kernel_packages(),
    )


def known_gpu(name: str, memory_bytes: int) -> Hardware | None:
    """The line of the hardware table a driver's device name means, or `None`.

    The model ("h100") must be a word of the name and the memory within a fifth of the table's.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower().replace("rtx ", "rtx")))
    for sheet in ASSUMED_HARDWARE.values():
        fits = abs(sheet.memory_bytes - memory_bytes) < sheet.memory_bytes / 5
        if sheet.platform != "cpu" and sheet.name.split("-")[0] in words and fits:
            return replace(sheet, assumed=False)
    return None


def _cpu() -> Hardware:
    return Hardware(
        name=_cpu_name(Path("/proc/cpuinfo")),
        platform="cpu",
        memory_bytes=total_host_bytes(MEMINFO, CGROUP),
        units=_usable_cores(),
        packages=kernel_packages() | compilers(),
    )


def compilers() -> frozenset[str]:
    """The C++ compiler that torch.compile takes by default, where there is one."""
    return frozenset({COMPILER} if shutil.which(COMPILER) else ())


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name(cpuinfo: Path) -> str:
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return "cpu"


def kernel_packages() -> frozenset[str]:
    """Kernel packages that can be imported, found without importing them."""
    return frozenset(name for name in KERNEL_PACKAGES if find_spec(name) is not None)
