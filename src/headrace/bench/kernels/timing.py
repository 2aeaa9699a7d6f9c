"""Times of single kernels, measured inside a CUDA graph so that launches cost what they will."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import torch

ROTATE_BYTES = 256 << 20  # several times the L2 of any GPU of today: each call finds cold weights
COPY_BYTES = 8 << 30
LEAST_CALLS = 16  # of a graph
REPLAYS = 15
LONG_CALLS = 10


def copies_of(size: int) -> int:
    """How many tensors of `size` bytes to take turns, so that none is in the cache when its turn
    comes."""
    return max(1, min(64, math.ceil(ROTATE_BYTES / size)))


def time_calls(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of one call; all calls are captured, one after another, in one graph."""
    calls = list(calls) * math.ceil(LEAST_CALLS / len(calls))
    calls[0]()  # what compiles, compiles here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return float(statistics.median(times[3:]))


def time_long_call(call: Callable[[], object]) -> float:
    """Median microseconds of a call that takes milliseconds, launched by itself.

    A few calls only: a device that multiplies for long runs into its power limit. Not in a graph: a
    copy there may be left to the copy engines, which are slower than the multiprocessors.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(LONG_CALLS + 1)]
    for _ in range(3):
        call()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = [1000 * start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
    return float(statistics.median(times))


def copy_rate() -> float:
    """Bytes a second of a large copy on the device, read and written.

    8 GiB, or what a third of the free memory holds: milliseconds, so that starting and ending do
    not count.
    """
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 3)
    source = torch.empty(size // 8, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return moved / time_long_call(lambda: target.copy_(source)) * 1e6
