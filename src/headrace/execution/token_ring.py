"""How a step's results reach the host: copies into pinned memory behind the step, and an event.

The host waits on the event of step n only after it launched step n + 1; that wait is the one
synchronisation of steady decode. The copies run on the forward stream: the next replay of a graph
overwrites what they read, so it must come after them. On the CPU the tensors are handed over as
they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def send(self, tensors: dict[str, Tensor]) -> InFlight:
        if not self._is_cuda:
            return InFlight(host=tensors, event=None)
        host = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for name, tensor in tensors.items()
        }
        event = torch.cuda.Event()
        event.record()
        return InFlight(host=host, event=event)
