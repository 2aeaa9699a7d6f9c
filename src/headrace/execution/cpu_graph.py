"""The CPU graph: decode steps whose code between attention calls is compiled for this CPU.

A step is the model's forward in pieces, compiled by torch.compile's inductor to C++
(`compiled_pieces.py`). Attention stays eager, since its sizes follow the lengths, and so does the
head. Products stay oneDNN's over packed weights: they are most of a step, and no compiler betters
them. What is saved is the dozen small operators around them.

One set of pieces per bucket of rows, compiled when the first step that needs it arrives; rows are
padded with row 0. Compiled code outlives the process in inductor's cache.
"""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.base.decision import NotYet, Refusal
from headrace.base.log import get_logger
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.outputs import LogitsProcessorOutput
from headrace.execution.compiled_pieces import CompiledForward
from headrace.execution.eager_ends import EagerEnds
from headrace.execution.path import CaptureReport
from headrace.layers.attention import SelfAttention

log = get_logger(__name__)

LARGEST = 8  # more rows and the products are most of a step
COMPILE_SECONDS = 180.0  # of all buckets together
REMEDY = "Use cpu_graph off, or mend the C++ compiler (CXX names it)"


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Powers of two up to `LARGEST`, or up to the most rows that run at a time."""
    last = min(most, LARGEST)
    return (*(size for size in (1, 2, 4) if size < last), last)


class CompiledStep:
    """A decode step of up to `size` rows."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[SelfAttention],
        groups: Mapping[str, int],
        size: int,
    ) -> None:
        self._forward = CompiledForward(
            model, layers, groups, size, device=torch.device("cpu"), remedy=REMEDY
        )
        self._size, self._groups = size, tuple(groups)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [B, H] of a prepared batch."""
        rows = batch.num_sequences
        padding = self._size - rows
        slots = [batch.kv[name].out_cache_loc for name in self._groups]
        arguments = [batch.input_ids, batch.positions, *slots]
        if padding:  # token 0 at position 0, written to slot 0
            arguments = [F.pad(argument, (0, padding)) for argument in arguments]

        def attend(layer: SelfAttention, q: Tensor) -> Tensor:
            if not padding:
                return layer.backend.forward(q, layer, batch)
            out = layer.backend.forward(q[:rows], layer, batch)
            return F.pad(out, (0, 0, 0, 0, 0, padding))

        return self._forward.run(arguments, attend)[:rows]


class CpuGraphPath:
    """Decode steps with compiled pieces.

    Args:
        sizes: rows of the buckets, ascending.
        model: what `EagerPath` runs: (input_ids, positions, batch) -> hidden states.
        layers: its attention layers, bound to pool and backend.
        groups: page size of each KV group.
        ends: what stands around the model.
        compile_seconds: once so much time went into compiling, no further bucket is compiled.
    """

    name = "cpu_graph"

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        model: nn.Module,
        layers: Sequence[SelfAttention],
        groups: Mapping[str, int],
        ends: EagerEnds,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self.sizes = tuple(sizes)
        self._model, self._layers = model, tuple(layers)
        self._groups, self.ends = dict(groups), ends
        self._compile_seconds = compile_seconds
        self._compiled: dict[Bucket, CompiledStep] = {}
        self._report = CaptureReport(seconds={}, bytes={})

    # ---- choosing

    def admits(self, facts: BatchFacts) -> Bucket | Refusal:
        reason = self._refusal(facts)
        if not reason and (bucket := self._bucket(facts)) in self._compiled:
            return bucket
        if reason or self._spent:
            return Refusal(subject=self.name, reason=reason or self._out_of_time())
        return NotYet(subject=self.name, reason="not compiled yet")

    def _refusal(self, facts: BatchFacts) -> str:
        if facts.mode is not ForwardMode.DECODE:
            return "the step holds prompt tokens"
        if facts.sequences > self.sizes[-1]:
            return f"more rows than the largest bucket ({self.sizes[-1]})"
        if facts.hidden_layers:
            return "hidden states of inner layers are asked, which compiled pieces do not leave"
        return ""

    def _out_of_time(self) -> str:
        return f"not compiled: the {self._compile_seconds:.0f} s for compiling are spent"

    @property
    def _spent(self) -> bool:
        return sum(self._report.seconds.values()) >= self._compile_seconds

    def _bucket(self, facts: BatchFacts) -> Bucket:
        size = self.sizes[bisect_left(self.sizes, facts.sequences)]
        return Bucket(tokens=size, sequences=size)

    # ---- compiling

    def prepare(self) -> CaptureReport:
        """Compile the smallest bucket, so that a compiler that fails shows at the start.

        The other buckets are compiled at need; the report grows with them. Bytes are of code and
        not counted.

        Raises:
            UnsupportedError: the compiler fails.
        """
        size = self.sizes[0]
        self.compile(Bucket(tokens=size, sequences=size))
        return self._report

    def make_ready(self, facts: BatchFacts) -> None:
        """Compile the bucket of such a batch, if there is one, it is missing, and time is left."""
        if self._refusal(facts) or self._spent:
            return
        self.compile(self._bucket(facts))

    def prepare_more(self) -> bool:
        """Compiling takes seconds, in which nobody would be served: only steps ask for it."""
        return False

    def compile(self, bucket: Bucket) -> None:
        if bucket in self._compiled:
            return
        start = time.perf_counter()
        with torch.inference_mode():
            self._compiled[bucket] = CompiledStep(
                self._model, self._layers, self._groups, bucket.sequences
            )
        self._report.seconds[bucket] = time.perf_counter() - start
        self._report.bytes[bucket] = 0
        log.info("compiled %s rows in %.1f s", bucket.sequences, self._report.seconds[bucket])

    # ---- delivery

    def run(self, batch: ForwardBatch, bucket: Bucket) -> LogitsProcessorOutput:
        self.ends.begin(batch)
        hidden = self._compiled[bucket].run(batch)
        return self.ends.finish(hidden, batch)
