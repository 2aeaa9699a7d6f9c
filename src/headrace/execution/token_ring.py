"""How a step's results reach the host: copies into pinned memory behind the step, and an event.

The host waits on the event of step n only after it launched step n + 1; that wait is the one
synchronisation of steady decode. The copies run on the forward stream: the next replay of a graph
overwrites what they read, so it must come after them. Large tensors that have memory of their own,
such as the hidden states of a long prompt, go on a stream aside, so that the next step does not
wait for tens of megabytes. On the CPU the tensors are handed over as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE_BYTES = 1 << 18  # a GPU sends so much in some 5 us
ASIDE_BYTES = 1 << 20  # and so much in some 20 us, which two more events are worth


@dataclass(slots=True, kw_only=True)
class InFlight:
    """Tensors on their way to the host. `wait` blocks until they are there.

    `aside`: event of the copies on the stream aside, and what they read, whose memory must not go
    to others before.
    """

    host: dict[str, Tensor]
    event: torch.cuda.Event | None
    aside: tuple[torch.cuda.Event, list[Tensor]] | None = None

    def wait(self) -> dict[str, Tensor]:
        if self.event is not None:
            self.event.synchronize()
        if self.aside is not None:
            self.aside[0].synchronize()
            self.aside = None
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
        self._aside: torch.cuda.Stream | None = None

    def send(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
    ) -> InFlight:
        """Send them all.

        Args:
            own: tensors that nobody will write any more, and that lie nowhere else.
        """
        own = own or {}
        if not self._is_cuda:
            return InFlight(host={**tensors, **own}, event=None)
        large = {name: each for name, each in own.items() if each.nbytes > ASIDE_BYTES}
        small = {name: each for name, each in own.items() if name not in large}
        host = host_copies({**tensors, **small}, pinned=True)
        event = torch.cuda.Event()
        event.record()
        if not large:
            return InFlight(host=host, event=event)
        copies, arrived = self._send_aside(large, event)
        return InFlight(host=host | copies, event=event, aside=(arrived, list(large.values())))

    def _send_aside(
        self, tensors: Mapping[str, Tensor], written: torch.cuda.Event
    ) -> tuple[dict[str, Tensor], torch.cuda.Event]:
        """Copies of tensors that are complete at `written`, and the event behind them."""
        if self._aside is None:
            self._aside = torch.cuda.Stream()
        self._aside.wait_event(written)
        with torch.cuda.stream(self._aside):
            copies = {name: _copy(tensor, pinned=True) for name, tensor in tensors.items()}
            arrived = torch.cuda.Event()
            arrived.record()
        return copies, arrived


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
