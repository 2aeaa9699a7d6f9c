"""The CPU graph: decode steps whose code between attention calls is compiled for this CPU.

A step is the model's forward in pieces (`pieces.py`), compiled by torch.compile's inductor to C++;
equal layers share one compiled piece. Attention stays eager, since its sizes follow the lengths,
and so does the head. Products stay oneDNN's over packed weights: they are most of a step, and no
compiler betters them. What is saved is the dozen small operators around them.

One set of pieces per bucket of rows, compiled when the first step that needs it arrives; rows are
padded with row 0. Compiled code outlives the process in inductor's cache.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from headrace.attention.backend import AttentionBackend
from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.base.log import get_logger
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.outputs import LogitsProcessorOutput, PPProxyTensors
from headrace.execution.eager import Logits
from headrace.execution.path import CaptureReport
from headrace.execution.pieces import Piece, cut_decode
from headrace.execution.preparation import BatchPreparation
from headrace.layers.attention import SelfAttention

log = get_logger(__name__)

LARGEST = 8  # more rows and the products are most of a step
COMPILE_SECONDS = 180.0  # of all buckets together
# Packed weights are given to inductor as plain ones, so it must not check their strides.
INDUCTOR_OPTIONS: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}

Function = Callable[..., Sequence[Tensor]]


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Powers of two up to `LARGEST`, or up to the most rows that run at a time."""
    last = min(most, LARGEST)
    return (*(size for size in (1, 2, 4) if size < last), last)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPiece:
    """A piece, its function, and the layer whose attention follows."""

    function: Function
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    layer: SelfAttention | None
    query: int
    attended: int


class CompiledStep:
    """A decode step of up to `size` rows."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[int, SelfAttention],
        groups: Mapping[str, int],
        size: int,
    ) -> None:
        cut = cut_decode(model, groups, size)
        functions: dict[str, Function] = {}
        for piece in cut.pieces:
            if piece.key not in functions:
                functions[piece.key] = compile_piece(piece)
        self._size, self._groups = size, tuple(groups)
        self._values, self._arguments, self._result = cut.values, cut.arguments, cut.result
        self._pieces = tuple(
            CompiledPiece(
                function=functions[piece.key],
                inputs=piece.inputs,
                outputs=piece.outputs,
                layer=None if piece.layer is None else layers[piece.layer],
                query=piece.query,
                attended=piece.attended,
            )
            for piece in cut.pieces
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [B, H] of a prepared batch."""
        rows = batch.num_sequences
        padding = self._size - rows
        values: list[Any] = list(self._values)
        slots = [batch.kv[name].out_cache_loc for name in self._groups]
        for place, argument in zip(
            self._arguments, (batch.input_ids, batch.positions, *slots), strict=True
        ):
            # token 0 at position 0, written to slot 0
            values[place] = F.pad(argument, (0, padding)) if padding else argument
        for piece in self._pieces:
            results = piece.function(*[values[place] for place in piece.inputs])
            for place, result in zip(piece.outputs, results, strict=True):
                values[place] = result
            layer = piece.layer
            if layer is not None:
                q = values[piece.query]  # [size, N, D]
                out = layer.backend.forward(q[:rows] if padding else q, layer, batch)
                values[piece.attended] = F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out
        hidden: Tensor = values[self._result]
        return hidden[:rows]


def compile_piece(piece: Piece) -> Function:
    """Compile one piece for the shapes of its examples.

    Raises:
        UnsupportedError: the compiler of this machine cannot.
    """
    from torch import _inductor  # takes seconds to import, and most starts need none of it

    mode = FakeTensorMode()
    examples: list[Any] = [_plain(example, mode) for example in piece.examples]
    try:
        function: Function = _inductor.compile(piece.graph, examples, options=INDUCTOR_OPTIONS)
    except Exception as error:
        raise UnsupportedError(
            "The CPU graph cannot be compiled",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            remedy="Use cpu_graph off, or mend the C++ compiler (CXX names it)",
        ) from error
    return function


def _plain(example: Tensor, mode: FakeTensorMode) -> Tensor:
    """The example without data; a packed weight as a plain one of its shape."""
    if example.layout is torch.strided:
        return mode.from_tensor(example)
    with mode:
        return torch.empty(example.shape, dtype=example.dtype)


class CpuGraphPath:
    """Decode steps with compiled pieces.

    Args:
        sizes: rows of the buckets, ascending.
        model: what `EagerPath` runs: (input_ids, positions, batch) -> hidden states.
        layers: its attention layers, bound to pool and backend.
        groups: page size of each KV group.
        preparation, backends, logits: as for `EagerPath`.
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
        preparation: BatchPreparation,
        backends: Sequence[AttentionBackend],
        logits: Logits,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self.sizes = tuple(sizes)
        self._model, self._layers = model, {layer.layer_id: layer for layer in layers}
        self._groups, self._preparation = dict(groups), preparation
        self._backends, self._logits = tuple(backends), logits
        self._compile_seconds = compile_seconds
        self._compiled: dict[Bucket, CompiledStep] = {}
        self._report = CaptureReport(seconds={}, bytes={})

    # ---- choosing

    def admits(self, facts: BatchFacts) -> Bucket | Refusal:
        reason = self._refusal(facts)
        if not reason and (bucket := self._bucket(facts)) in self._compiled:
            return bucket
        return Refusal(subject=self.name, reason=reason or self._not_compiled())

    def _refusal(self, facts: BatchFacts) -> str:
        if facts.mode is not ForwardMode.DECODE:
            return "the step holds prompt tokens"
        if facts.sequences > self.sizes[-1]:
            return f"more rows than the largest bucket ({self.sizes[-1]})"
        return ""

    def _not_compiled(self) -> str:
        if self._spent:
            return f"not compiled: the {self._compile_seconds:.0f} s for compiling are spent"
        return "not compiled yet"

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

    def run(
        self,
        batch: ForwardBatch,
        bucket: Bucket,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> LogitsProcessorOutput | PPProxyTensors:
        assert pp_proxy_tensors is None, "pipeline stages are refused by the plan"
        self._preparation.fill(batch)
        for backend in self._backends:
            backend.prepare_metadata(batch)
        return self._logits(self._compiled[bucket].run(batch), batch)
