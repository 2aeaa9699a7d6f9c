"""How sampled tokens reach the host: a copy on a side stream into a pinned ring.

The host waits on the event of step n only after it launched step n + 1; that wait is the one
synchronisation of steady decode. On the CPU the same object hands the tensors over at once.
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
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tensors: dict[str, Tensor]) -> InFlight:
        if self._stream is None:
            return InFlight(host=tensors, event=None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = {}
            for name, tensor in tensors.items():
                tensor.record_stream(self._stream)
                target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name] = target.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return InFlight(host=host, event=event)
