"""The decode graph: preparation, forward, sampling and advance of a step in one CUDA graph.

The host sends the rows and replays; every other number comes from the rows' columns and the page
tables on the device. One graph per bucket (rows padded with row 0) and variant: `filters` holds the
passes of top-k, top-p and min-p, which the plain one leaves out.

A bucket is captured when the first step that fits it arrives, on row 0 and page 0 only. Everything
a graph touches is allocated once: the static buffers here, the scratch of backends and sampler,
and the pool that all graphs share.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend
from headrace.base.decision import NotYet, Refusal
from headrace.base.log import get_logger
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.outputs import HiddenStates, LogitsProcessorOutput
from headrace.batch.rows import Rows
from headrace.batch.side_request import HiddenStateRequest
from headrace.execution.captures_buckets import CapturesBuckets
from headrace.execution.eager import Model
from headrace.execution.graph_recorder import held_bytes, place_of
from headrace.execution.kept_states import KeptStates
from headrace.kernels.batch_preparation_triton import advance_decode, prepare_decode
from headrace.kernels.one_storage import one_storage
from headrace.kernels.sampling_triton import SamplingColumns, SamplingScratch, sample_tokens
from headrace.layers.logits import hidden_states
from headrace.observers.tap import NO_TAPS, Taps

log = get_logger(__name__)

FILTERS = "filters"
WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A graph and the tensors it leaves its results in: logits [n, V], and the hidden states [n, H]
    that they were made of."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    hidden: Tensor


class StaticInputs:
    """Buffers that graphs read and write, for the largest bucket; smaller ones use their front."""

    def __init__(self, size: int, tables: Mapping[str, Tensor], device: torch.device) -> None:
        def buffer(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((size, *shape), dtype=dtype, device=device)

        self.rows = buffer(torch.int64)
        self.input_ids = buffer(torch.int64)
        self.positions = buffer(torch.int64)
        self.seq_lens = buffer(torch.int32)
        self.page_tables = {name: buffer(torch.int32, t.shape[1]) for name, t in tables.items()}
        self.out_cache_locs = {name: buffer(torch.int64) for name in tables}
        self.tokens, self.finite = one_storage(
            device, (torch.int64, (size,)), (torch.bool, (size,)), zeroed=True
        )

    def batch(self, size: int, page_size: int) -> ForwardBatch:
        """A decode batch over the first `size` places; no live token, as in warm-up."""
        facts = BatchFacts(
            mode=ForwardMode.DECODE, tokens=size, live_tokens=0, sequences=size, max_length=0
        )
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            rows=self.rows[:size],
            bounds=HostBounds(seq_lens=[0] * size, extend_lens=[0] * size),
            facts=facts,
            input_ids=self.input_ids[:size],
            positions=self.positions[:size],
            seq_lens=self.seq_lens[:size],
            kv={
                name: KvGroup(
                    name=name,
                    page_size=page_size,
                    page_table=table[:size],
                    out_cache_loc=self.out_cache_locs[name][:size],
                )
                for name, table in self.page_tables.items()
            },
        )


class DecodeGraphPath(CapturesBuckets[CapturedStep]):
    """Decode steps as graph replays. Variants with filters are captured at need only.

    Args:
        sizes: rows of the buckets, ascending.
        rows: the columns. tables: page table [R, max pages] int32 of each KV group.
        backends: one per KV group; they admit capture.
        model: (input_ids, positions, batch) -> hidden states.
        head: hidden states [n, H] -> logits [n, V] float32.
        pdl: programmatic dependent launch.
        taps: device work around the model, recorded with it.
        kept: where `model` leaves states of inner layers; `None` where it keeps none.
    """

    name = "decode_graph"

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        rows: Rows,
        tables: Mapping[str, Tensor],
        page_size: int,
        backends: Sequence[AttentionBackend],
        model: Model,
        head: Callable[[Tensor], Tensor],
        pdl: bool,
        taps: Taps = NO_TAPS,
        kept: KeptStates | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        super().__init__([Bucket(tokens=size, sequences=size) for size in self.sizes])
        self._rows, self._tables, self._page_size = rows, dict(tables), page_size
        self._backends, self._model, self._head = tuple(backends), model, head
        self._pdl, self._taps, self._kept = pdl, taps, kept
        largest = self.sizes[-1]
        self._inputs = StaticInputs(largest, self._tables, rows.device)
        self._columns = SamplingColumns.of(rows)
        self._scratch = SamplingScratch.allocate(largest, rows.device)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: cuBLAS keeps a workspace of up to 32 MiB for each stream it meets.
        self._stream = torch.cuda.Stream()
        self._last_rows: tuple[int, ...] = ()

    # ---- choosing

    def admits(self, facts: BatchFacts) -> Bucket | Refusal:
        reason, remedy = self._refusal(facts)
        if reason:
            return Refusal(subject=self.name, reason=reason, remedy=remedy)
        bucket = self._bucket(facts)
        if bucket not in self._captured:
            return NotYet(subject=self.name, reason="not captured yet")
        return bucket

    def _refusal(self, facts: BatchFacts) -> tuple[str, str]:
        """Why such a batch is not taken, and the remedy; both empty where it is."""
        reason = ""
        if facts.mode is not ForwardMode.DECODE:
            reason = "the step holds prompt tokens"
        elif facts.sequences > self.sizes[-1]:
            reason = f"more rows than the largest bucket ({self.sizes[-1]})"
        elif facts.host_mask:
            reason = "a row brings a mask that the host made"
        elif missing := self._not_kept(facts):
            asked = ",".join(map(str, missing))
            return (
                f"hidden states of layers {asked} are asked, which its graphs do not keep",
                f"start with hidden_state_layers {asked}",
            )
        elif facts.processed_logprobs:
            reason = "a row asks for processed logprobs, which only eager sampling keeps"
        return reason, ""

    def _not_kept(self, facts: BatchFacts) -> list[int]:
        kept = () if self._kept is None else self._kept.layers
        return [layer for layer in facts.hidden_layers if layer not in kept]

    def _bucket(self, facts: BatchFacts) -> Bucket:
        size = self.sizes[bisect_left(self.sizes, facts.sequences)]
        return Bucket(tokens=size, sequences=size, variant=FILTERS if facts.filters else "")

    # ---- capture

    def make_ready(self, facts: BatchFacts) -> None:
        """Capture the bucket that such a batch needs, if it can take one and has none yet."""
        if self._refusal(facts)[0]:
            return
        bucket = self._bucket(facts)
        if bucket not in self._captured:
            self.capture(bucket)

    def rehearse(self, bucket: Bucket) -> None:
        """Launch what a step of the bucket launches, on row 0 and page 0, outside a graph."""
        self._step(self._begin(bucket), bucket)

    def _begin(self, bucket: Bucket) -> ForwardBatch:
        """The batch of the bucket, of row 0 alone, and what backends need for it."""
        self._inputs.rows.zero_()
        self._last_rows = ()
        for backend in self._backends:
            backend.capture_buffers(bucket)
        return self._inputs.batch(bucket.sequences, self._page_size)

    def capture(self, bucket: Bucket) -> None:
        start = time.perf_counter()
        before = held_bytes()
        batch = self._begin(bucket)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                self._step(batch, bucket)
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits, hidden = self._step(batch, bucket)
        # The logits of all buckets would take gigabytes: their places are shared like all else.
        # Both were held to the end of the capture, so that nothing of this step overwrites them.
        step = CapturedStep(graph=graph, logits=place_of(logits), hidden=place_of(hidden))
        del logits, hidden
        seconds = time.perf_counter() - start
        self._keep(bucket, step, seconds=seconds, size=held_bytes() - before)
        variant = f" ({bucket.variant})" if bucket.variant else ""
        log.info(
            "captured %s rows%s in %.2f s (%s without filters)",
            bucket.sequences,
            variant,
            seconds,
            self._so_far(),
        )

    def _step(self, batch: ForwardBatch, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Everything a decode step does on the device; returns the logits [n, V] and the hidden
        states [n, H]."""
        inputs, columns, size = self._inputs, self._rows, bucket.sequences
        prepare_decode(
            batch.rows,
            last_token=columns.last_token,
            length=columns.length,
            active=columns.active,
            tables=self._tables,
            page_size=self._page_size,
            input_ids=batch.input_ids,
            positions=batch.positions,
            seq_lens=batch.seq_lens,
            page_tables={name: group.page_table for name, group in batch.kv.items()},
            out_cache_locs={name: group.out_cache_loc for name, group in batch.kv.items()},
            pdl=self._pdl,
        )
        for backend in self._backends:
            backend.prepare_metadata_in_graph(batch)
        self._taps.before(batch)
        hidden = self._model(batch.input_ids, batch.positions, batch)
        self._taps.after(batch)
        logits = self._head(hidden)
        tokens, finite = inputs.tokens[:size], inputs.finite[:size]
        sample_tokens(
            logits,
            batch.rows,
            batch.seq_lens,
            self._columns,
            tokens=tokens,
            finite=finite,
            scratch=self._scratch,
            filters=bucket.variant == FILTERS,
            pdl=self._pdl,
        )
        advance_decode(
            batch.rows,
            tokens,
            finite,
            length=columns.length,
            last_token=columns.last_token,
            active=columns.active,
            stop_ids=columns.stop_ids,
            penalised=columns.penalised,
            token_counts=columns.token_counts,
            pdl=self._pdl,
        )
        return logits, hidden

    # ---- delivery

    def run(self, batch: ForwardBatch, bucket: Bucket) -> LogitsProcessorOutput:
        """Replay. The results are views of static buffers, good until the next replay."""
        captured, size = self._captured[bucket], batch.num_sequences
        self._send_rows(batch, bucket.sequences)
        captured.graph.replay()
        return LogitsProcessorOutput(
            next_token_logits=captured.logits[:size],
            next_token_ids=self._inputs.tokens[:size],
            finite=self._inputs.finite[:size],
            hidden=self._states(captured.hidden, batch.side.hidden),
        )

    def _states(self, hidden: Tensor, request: HiddenStateRequest | None) -> HiddenStates | None:
        """Copied behind the replay, for the rows that ask; a graph itself knows nothing of it."""
        if request is None:
            return None
        asked = None
        if request.layers:
            assert self._kept is not None, "other layers are refused"
            assert request.token_index is not None, "layers are asked of rows"
            asked = self._kept.of(request.layers, request.token_index)
        return hidden_states(hidden, request, asked)

    def _send_rows(self, batch: ForwardBatch, padded: int) -> None:
        """The rows of the step, padded with row 0; nothing to send when they stayed the same."""
        rows = (*batch.bounds.rows, *[0] * (padded - batch.num_sequences))
        if rows == self._last_rows:
            return
        self._last_rows = rows
        self._inputs.rows[: batch.num_sequences].copy_(batch.rows)
        self._inputs.rows[batch.num_sequences : padded].zero_()
