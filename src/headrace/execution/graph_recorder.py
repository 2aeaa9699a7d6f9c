"""Segments as CUDA graphs that share one pool of memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

from headrace.execution.segments import Replay

_INTEGERS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}  # of as many bytes as an element


def held_bytes() -> int:
    """Device memory that torch holds for this process, the pools of graphs included.

    The device's own count of free memory would also show what other processes take meanwhile.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def place_of(tensor: Tensor) -> Tensor:
    """The same addresses without a share in the memory, which the pool may use again.

    The pool's memory stays mapped as long as a graph of it lives. Integers stand for the
    elements on the way: the array interface has no bfloat16.
    """
    size = tensor.element_size()
    place = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "typestr": _INTEGERS[size],
        "data": (tensor.data_ptr(), False),
        "strides": tuple(stride * size for stride in tensor.stride()),
    }
    holder = SimpleNamespace(__cuda_array_interface__=place)
    return torch.as_tensor(holder, device=tensor.device).view(tensor.dtype)


class GraphRecorder:
    """A CUDA graph per segment.

    All graphs are captured on one stream, since a pool hands memory that became free on a stream
    to that stream alone.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Drains the device, and gives back what the allocator only keeps: a pool cannot use it."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def end(self) -> Replay:
        graph = self._graph
        assert graph is not None, "a segment was begun"
        self._graph = None
        graph.capture_end()
        return graph.replay

    def place_of(self, tensor: Tensor) -> Tensor:
        return place_of(tensor)

    def held_bytes(self) -> int:
        return held_bytes()
