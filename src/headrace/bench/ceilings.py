"""What the device can do at best, measured on the day: the two rates that floors are made of."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

CUDA_SIDE, CPU_SIDE = 8192, 2048
CPU_READ_BYTES = 1 << 30  # far more than any cache
_CPU_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of one device.

    Attributes:
        bandwidth: bytes a second. matrix_rate: operations a second (a multiply and an add are two).
        dtype: of the product. how: what was timed.
    """

    bandwidth: float
    matrix_rate: float
    dtype: str
    how: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"ceilings: {rate(self.bandwidth, 'B/s')}, {rate(self.matrix_rate, 'FLOP/s')} "
            f"{self.dtype} ({self.how})"
        )


def rate(value: float, unit: str) -> str:
    """4.26 TB/s; of a CPU 9.87 GB/s"""
    scale, prefix = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / scale:.4g} {prefix}{unit}"


def measure_ceilings(
    device: torch.device,
    dtype: torch.dtype,
    *,
    side: int | None = None,
    read_bytes: int = CPU_READ_BYTES,
) -> Ceilings:
    """On a GPU a large copy (read + write) and a product; on a CPU a large read and a product.

    Measure before a model is loaded: it takes a good part of the memory for a moment.

    Args:
        side: of the square matrices. read_bytes: read from a CPU's memory.
    """
    side = side or (CUDA_SIDE if device.type == "cuda" else CPU_SIDE)
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)

    def product() -> object:
        return torch.matmul(left, right, out=out)

    if device.type == "cuda":
        bandwidth, seconds, moved = _cuda(product)
    else:
        bandwidth, seconds, moved = _cpu_read_rate(read_bytes), _cpu_seconds(product), "memory read"
    return Ceilings(
        bandwidth=bandwidth,
        matrix_rate=2 * side**3 / seconds,
        dtype=str(dtype).removeprefix("torch."),
        how=f"{moved}, {side}^3 product",
    )


def _cuda(product: Callable[[], object]) -> tuple[float, float, str]:
    from headrace.bench.kernels.timing import copy_rate, time_long_call

    bandwidth, seconds = copy_rate(), time_long_call(product) / 1e6
    torch.cuda.empty_cache()  # the budget of the engine looks at what is free
    return bandwidth, seconds, "device copy"


def _cpu_read_rate(size: int) -> float:
    memory = torch.ones(size // 8, dtype=torch.int64)
    return memory.nbytes / _cpu_seconds(lambda: memory.sum())


def _cpu_seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_CPU_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
