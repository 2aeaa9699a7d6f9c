"""How a step's results reach the host: copies into pinned memory behind the step, and an event.

The host waits on the event of step n only after it launched step n + 1; that wait is the one
synchronisation of steady decode. The copies run on the forward stream: the next replay of a graph
overwrites what they read, so it must come after them. On the CPU the tensors are handed over as
they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE_BYTES = 1 << 18  # a GPU sends so much in some 5 us


@dataclass(slots=True, kw_only=True)
class InFlight:
    """Tensors on their way to the host. `wait` blocks until they are there."""

    host: dict[str, Tensor]
    event: torch.cuda.Event | None

    def wait(self) -> dict[str, Tensor]:
        if self.event is not None:
            self.event.synchronize()
        return self.host


class TokenRing:
    """Sends the results of a step to the host.

    Pinned memory comes from torch's caching host allocator, which reuses a block only after the
    copy that used it has passed on its stream: a block in flight is never overwritten.

    A copy costs a GPU some microseconds between two steps, whatever it brings. So a small storage
    travels whole, by one copy, for all the tensors that lie in it (`kernels.one_storage`).
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def send(self, tensors: dict[str, Tensor]) -> InFlight:
        if not self._is_cuda:
            return InFlight(host=tensors, event=None)
        host = host_copies(tensors, pinned=True)
        event = torch.cuda.Event()
        event.record()
        return InFlight(host=host, event=event)


def host_copies(tensors: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
    """The tensors on the host once the stream has come so far.

    Args:
        pinned: into pinned memory, so that the host need not wait.
    """
    whole: dict[int, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.nbytes() > WHOLE_BYTES:
            copies[name] = _copy(tensor, pinned)
            continue
        place = storage.data_ptr()
        if place not in whole:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            whole[place] = _copy(source, pinned)
        copies[name] = torch.empty(0, dtype=tensor.dtype).set_(
            whole[place].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
    return copies


def _copy(tensor: Tensor, pinned: bool) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)
