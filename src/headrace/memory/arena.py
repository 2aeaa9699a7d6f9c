"""Where every large tensor of a device comes from, so that memory can be accounted for by name."""

import math
import weakref
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.base.errors import CapacityError
from headrace.memory.free_memory import free_bytes

LARGE = 64 * 2**20
"""Bytes from which a host allocation is compared with free memory first. Linux hands out more than
it has and ends the process when the pages are touched, which no `except` can catch."""


class Arena:
    """Allocates tensors on one device, each under a tag: "weights", "kv", "rows", "graphs", ...

    A tensor counts as long as anything uses its storage, views and parameters included.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._bytes: Counter[str] = Counter()

    def allocate(
        self, tag: str, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = True
    ) -> Tensor:
        """A contiguous tensor of this shape.

        Args:
            tag: what its bytes are counted under.
            shape: the sizes.
            dtype: the element type.
            zero: fill with zeros; otherwise the content is undefined.

        Raises:
            CapacityError: the device has too little memory; names tag, bytes asked, bytes free.
        """
        asked = math.prod(shape) * dtype.itemsize
        if self.device.type == "cpu" and asked >= LARGE:
            free = free_bytes(self.device)
            if free is not None and asked > free:
                raise self._too_little(tag, asked)
        make = torch.zeros if zero else torch.empty
        try:
            tensor = make(tuple(shape), dtype=dtype, device=self.device)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise self._too_little(tag, asked) from error
        self._count(tag, tensor)
        return tensor

    def bytes(self, tag: str | None = None) -> int:
        """Bytes alive under a tag (0 for a tag never used), or under all tags."""
        return self._bytes.total() if tag is None else self._bytes[tag]

    def bytes_by_tag(self) -> dict[str, int]:
        """Bytes alive under every tag that has any, the largest first."""
        return {tag: count for tag, count in self._bytes.most_common() if count}

    def _count(self, tag: str, tensor: Tensor) -> None:
        # The storage and not the tensor is watched: a Parameter or a view made from the tensor
        # keeps the memory after the tensor object is gone.
        storage = tensor.untyped_storage()
        count = storage.nbytes()
        self._bytes[tag] += count
        weakref.finalize(storage, self._bytes.subtract, {tag: count}).atexit = False

    def _too_little(self, tag: str, asked: int) -> CapacityError:
        free = free_bytes(self.device)
        held = ", ".join(f"{tag} {_gib(count)}" for tag, count in self.bytes_by_tag().items())
        return CapacityError(
            f"{self.device} has too little memory for {tag!r}: {asked:,} bytes ({_gib(asked)}) "
            f"asked, {'an unknown number of' if free is None else f'{free:,}'} bytes free",
            why=f"allocated before: {held or 'nothing'}",
            remedy="Lower mem_fraction, max_total_tokens or max_running_requests, take a smaller "
            "model or dtype, or free memory on the device.",
        )


def _is_out_of_memory(error: RuntimeError) -> bool:
    # torch has an error type for devices; its CPU allocator raises a plain RuntimeError
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
