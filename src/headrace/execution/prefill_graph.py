"""The prefill graph: extend and mixed steps of few tokens, whose body is replayed.

Such a step is bound by the host, which launches some ten kernels a layer while the device waits.
Here it launches one recorded segment and one attention a layer (`segments.py`). A bucket is a
number of tokens; padding is token 0 at position 0, written to slot 0. Attention is eager on the
live tokens, and so is the head on the live hidden states: any number of sequences, prefixes and
logprobs will do.

Two bodies can be recorded: the model as it is (breakable), or the model cut at attention with the
pieces compiled by torch.compile (piecewise).
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headrace.base.decision import NotYet, Refusal
from headrace.base.log import get_logger
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.outputs import LogitsProcessorOutput
from headrace.execution.captures_buckets import CapturesBuckets
from headrace.execution.eager import Model
from headrace.execution.eager_ends import EagerEnds
from headrace.execution.segments import RecordedBody, Recorder, record
from headrace.layers.attention import SelfAttention

log = get_logger(__name__)

# Tokens of the buckets. Up to a few hundred tokens a step reads the weights and padding is nearly
# free; beyond, products work in tiles of 64 or 128 tokens anyway. Larger steps keep the device busy
# longer than the host needs to launch them.
BREAKABLE_SIZES = (4, 8, 16, *range(32, 128, 16), *range(128, 256, 32), *range(256, 1025, 64))
# Powers of two, since each is compiled for seconds.
PIECEWISE_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
SECOND_ASK = 2

NOT_CAPTURED = "not captured yet"


def prefill_sizes(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets that steps of up to `most` tokens need."""
    return tuple(sizes[: bisect_left(sizes, most) + 1])


class PrefillInputs:
    """Buffers that recorded bodies read, for the largest bucket; smaller ones use their front.

    Args:
        size: tokens. groups: page size of each KV group. layers: the attention layers.
        dtype: of q. device: of all.
    """

    def __init__(
        self,
        size: int,
        groups: Mapping[str, int],
        layers: Sequence[SelfAttention],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups = dict(groups)
        # input ids, positions, and the slots of each group
        self._numbers = torch.zeros((2 + len(groups), size), dtype=torch.int64, device=device)
        # One for all layers of a shape: a result is read before the next layer writes its own.
        shapes = {(layer.num_heads, layer.v_head_dim) for layer in layers}
        self._attended = {
            shape: torch.zeros((size, *shape), dtype=dtype, device=device) for shape in shapes
        }

    def attended(self, layer: SelfAttention, tokens: int) -> Tensor:
        """[tokens, N, Dv], where the attention of `layer` leaves its result."""
        return self._attended[layer.num_heads, layer.v_head_dim][:tokens]

    def batch(self, size: int) -> ForwardBatch:
        """An extend batch over the first `size` places; no live token, as in warm-up."""
        facts = BatchFacts(
            mode=ForwardMode.EXTEND,
            tokens=size,
            live_tokens=0,
            sequences=1,
            max_length=size,
            has_prefix=True,  # so that no keys are taken from anywhere but the pool
        )
        rows = torch.zeros(1, dtype=torch.int64, device=self._numbers.device)
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            rows=rows,
            bounds=HostBounds(seq_lens=[size], extend_lens=[size], rows=[0]),
            facts=facts,
            input_ids=self._numbers[0, :size],
            positions=self._numbers[1, :size],
            kv={
                name: KvGroup(
                    name=name,
                    page_size=page_size,
                    page_table=rows[:, None].int(),
                    out_cache_loc=self._numbers[2 + index, :size],
                )
                for index, (name, page_size) in enumerate(self._groups.items())
            },
        )

    def clear(self) -> None:
        """Nothing but padding."""
        self._numbers.zero_()
        for buffer in self._attended.values():
            buffer.zero_()

    def fill(self, batch: ForwardBatch, padded: int) -> None:
        """The inputs of a prepared batch, and padding up to `padded` tokens."""
        tokens = batch.num_tokens
        slots = [batch.kv[name].out_cache_loc for name in self._groups]
        self._numbers[:, :tokens] = torch.stack((batch.input_ids, batch.positions, *slots))
        if tokens < padded:
            self._numbers[:, tokens:padded].zero_()
            for buffer in self._attended.values():
                buffer[tokens:padded].zero_()  # attention leaves it so


class PrefillGraphPath(CapturesBuckets[RecordedBody]):
    """Extend and mixed steps as replays between eager attention calls.

    A bucket is captured when a step asks for it the `ask`-th time: capturing takes some tenths of a
    second, in which nobody is served, so a length that comes once is not worth it.

    Args:
        sizes: tokens of the buckets, ascending.
        body: tokens of a bucket -> what is recorded for it, called as `EagerPath` calls its model.
        layers: the attention layers, bound to pool and backend.
        groups: page size of each KV group.
        dtype: of the model. device: where it lies.
        recorder: how segments are recorded.
        ask: 1 captures at the first ask.
        quick: a body is there at once and not compiled for seconds, so that an idle moment will do.
        ends: what stands around the body. Taps are not recorded, since they read tables, which the
            recorded body has none of.
    """

    name = "prefill_graph"

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        body: Callable[[int], Model],
        layers: Sequence[SelfAttention],
        groups: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        recorder: Recorder,
        ask: int,
        quick: bool,
        ends: EagerEnds,
    ) -> None:
        self.sizes = tuple(sizes)
        super().__init__([Bucket(tokens=size, sequences=0) for size in self.sizes])
        self._body, self._layers, self._recorder = body, tuple(layers), recorder
        self._inputs = PrefillInputs(self.sizes[-1], groups, layers, dtype=dtype, device=device)
        self.ends = ends
        self._ask, self._quick, self._asked = ask, quick, Counter[Bucket]()

    # ---- choosing

    def admits(self, facts: BatchFacts) -> Bucket | Refusal:
        reason = self._refusal(facts)
        if reason:
            return Refusal(subject=self.name, reason=reason)
        if (bucket := self._bucket(facts)) in self._captured:
            return bucket
        return NotYet(subject=self.name, reason=NOT_CAPTURED)

    def _refusal(self, facts: BatchFacts) -> str:
        if facts.mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return "the step holds no prompt tokens"
        if facts.tokens > self.sizes[-1]:
            return f"more tokens than the largest bucket ({self.sizes[-1]})"
        if (size := self._bucket(facts).tokens) > 2 * facts.live_tokens:
            return f"its bucket ({size}) is more than twice its tokens"
        if facts.hidden_layers:
            return "hidden states of inner layers are asked, which recorded segments do not leave"
        if facts.adapters:
            return "adapters are chosen by row, the recorded body has none"
        return ""

    def _bucket(self, facts: BatchFacts) -> Bucket:
        size = self.sizes[bisect_left(self.sizes, facts.tokens)]
        return Bucket(tokens=size, sequences=0)  # of any number

    # ---- capture

    def prepare_more(self) -> bool:
        return self._quick and super().prepare_more()

    def make_ready(self, facts: BatchFacts) -> None:
        """Count the ask, and capture the bucket if it is time."""
        if self._refusal(facts):
            return
        bucket = self._bucket(facts)
        if bucket in self._captured:
            return
        self._asked[bucket] += 1
        if self._asked[bucket] >= self._ask:
            self.capture(bucket)

    @torch.inference_mode()
    def capture(self, bucket: Bucket) -> None:
        start, before = time.perf_counter(), self._recorder.held_bytes()
        self._inputs.clear()
        captured = record(
            self._body(bucket.tokens),
            self._inputs.batch(bucket.tokens),
            layers=self._layers,
            attended=self._inputs.attended,
            recorder=self._recorder,
        )
        size = self._recorder.held_bytes() - before
        seconds = time.perf_counter() - start
        self._keep(bucket, captured, seconds=seconds, size=size)
        log.info(
            "captured %s prompt tokens, %s segments, in %.2f s (%s)",
            bucket.tokens,
            len(captured.segments),
            seconds,
            self._so_far(),
        )

    # ---- delivery

    def run(self, batch: ForwardBatch, bucket: Bucket) -> LogitsProcessorOutput:
        self.ends.begin(batch)
        self._inputs.fill(batch, bucket.tokens)
        hidden = self._captured[bucket].replay(batch, bucket.tokens)
        return self.ends.finish(hidden, batch)
