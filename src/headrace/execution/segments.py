"""A model's body recorded in segments between attention calls.

While a body is recorded, a mark stands in the place of every layer's backend. Where the model calls
it, the recording of one segment ends and the next begins; the call itself is made at every replay,
eagerly, since its sizes follow the lengths. Models and layers know nothing of it. (The idea:
SGLang's breakable CUDA graphs, 2025.)

What crosses a break lies where the segments left it: attention's results in buffers of ours, all
else in the memory of the recorder, which later segments reuse only once nobody needs it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.execution.eager import Model
from headrace.execution.replacing import replaced
from headrace.layers.attention import SelfAttention

WARM_UPS = 2  # before a recording: inside it nothing may be compiled, loaded or tuned

Replay = Callable[[], None]
Attended = Callable[[SelfAttention, int], Tensor]
"""(layer, tokens) -> the buffer [tokens, N, Dv] that holds the result of its attention."""


class Recorder(Protocol):
    """Records what is launched on a device and launches it again, at the same addresses."""

    def session(self) -> AbstractContextManager[None]:
        """Around warm-ups, and around the segments of one body; the device is idle before."""

    def begin(self) -> None:
        """Record from here on."""

    def end(self) -> Replay:
        """Record no more; what was recorded since `begin`."""

    def place_of(self, tensor: Tensor) -> Tensor:
        """The tensor as replays leave it, without keeping its memory from later segments."""

    def held_bytes(self) -> int:
        """Memory that is taken from the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A call of attention between two segments: its layer, q [T, N, D] and result [T, N, Dv]."""

    layer: SelfAttention
    query: Tensor
    attended: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What is replayed, and the attention that follows it; `None` behind the last one."""

    replay: Replay
    ending: Break | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBody:
    """The segments in their order and the hidden states [T, H] that the last one leaves."""

    segments: tuple[Segment, ...]
    hidden: Tensor

    def replay(self, batch: ForwardBatch, padded: int) -> Tensor:
        """Run a prepared batch whose inputs lie in the static buffers.

        Returns: [T, H], good until the next replay from the same memory.
        """
        tokens = batch.num_tokens
        for segment in self.segments:
            segment.replay()
            ending = segment.ending
            if ending is not None:
                q, out = ending.query, ending.attended
                if tokens < padded:
                    q, out = q[:tokens], out[:tokens]
                ending.layer.backend.forward(q, ending.layer, batch, out=out)
        return self.hidden[:tokens]


class _Mark:
    """Takes the place of a backend. Fresh keys and values are not taken: replays read the pool."""

    def __init__(self, attended: Attended, recorder: Recorder | None = None) -> None:
        self._attended, self._recorder = attended, recorder
        self.segments: list[Segment] = []

    def forward(self, q: Tensor, layer: SelfAttention, batch: ForwardBatch, **_: Any) -> Tensor:
        out = self._attended(layer, q.shape[0])
        recorder = self._recorder
        if recorder is not None:
            replay = recorder.end()
            ending = Break(layer=layer, query=recorder.place_of(q), attended=out)
            self.segments.append(Segment(replay=replay, ending=ending))
            recorder.begin()
        return out


def record(
    body: Model,
    batch: ForwardBatch,
    *,
    layers: Sequence[SelfAttention],
    attended: Attended,
    recorder: Recorder,
) -> RecordedBody:
    """Run `body` on the static inputs in `batch` and keep what it launches.

    Args:
        batch: input_ids, positions and write slots are read at every replay; no live token.
        layers: the attention layers, each of which may be called any number of times.
    """

    def run(mark: _Mark) -> Tensor:
        with replaced([(layer, "backend", mark) for layer in layers]):
            return body(batch.input_ids, batch.positions, batch)

    with recorder.session():
        for _ in range(WARM_UPS):
            run(_Mark(attended))
    mark = _Mark(attended, recorder)
    with recorder.session():
        recorder.begin()
        try:
            hidden = run(mark)
        finally:
            replay = recorder.end()
        last = Segment(replay=replay, ending=None)
        return RecordedBody(segments=(*mark.segments, last), hidden=recorder.place_of(hidden))
