"""The KV canary: records beside the KV pool that tell whether a sequence reads its own KV.

Each slot has a record of the token that was written to it (`kernels.kv_canary`). As a tap it checks
the history of every sequence before the model runs, stamps the new tokens, and checks again behind
the model, keys and values included. These are looked at once a step, behind the model: what a step
has read that was wrong is still wrong then, or was made wrong by the step itself. As an observer it
sends what was found to the host with the results of the step, and there it never raises: who is
concerned is the scheduler's to say.

It finds slots that were overwritten, stale, swapped or never written, page tables that lead
elsewhere, and keys and values that changed. It does not judge whether they are right numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.transfer import to_device
from headrace.kernels import kv_canary
from headrace.kernels.kv_canary import (
    FIELDS,
    PARTIAL_WORDS,
    SWEPT,
    CanaryRecords,
    CanaryReport,
    CanaryStep,
)
from headrace.kernels.one_storage import one_storage
from headrace.kernels.support_triton import triton_available
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool
from headrace.observers.step_observer import Evidence, ForwardRun

CAPACITY = 256
"""Violations of a step that are told in full; more are counted. A page that leads elsewhere has one
for each of its tokens."""

_RECORD_BYTES = 8  # of each part of a record


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One slot that is not what it should be.

    Attributes:
        kinds: bits of `kernels.kv_canary`. stage: when it was found.
        group: of KV. place: of the sequence in the batch, or of the page in the sweep.
        position: of the token. expected, found: of the first kind of position, chain, token, data.
    """

    kinds: int
    stage: int
    group: str
    place: int
    position: int
    slot: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryFindings:
    """What a step has told.

    Attributes:
        violations: sorted by place and position. lost: more, for which there was no room.
        ends: [groups, B] int64, chain of each sequence behind the step, 0 where it is not active.
        inputs: [2, T] int32, tokens and positions that were fed.
    """

    violations: tuple[Violation, ...]
    lost: int
    ends: Tensor
    inputs: Tensor


def record_bytes(groups: int, real_data: str) -> int:
    """Bytes beside each place of the pool."""
    parts = 2 if real_data == "off" else 3
    return groups * parts * _RECORD_BYTES


class KvCanary:
    """Tap and observer of one pool.

    Args:
        arena: where the records come from (tag "kv canary").
        pool: keys and values. groups: layers of each KV group in the pool.
        real_data: "off"; "partial": the first 16 bytes of a token's keys and of its values in every
            layer; "all".
        max_sequences, max_tokens: of a step.

    Raises:
        UnsupportedError: a GPU without Triton.
    """

    name = "kv_canary"

    def __init__(
        self,
        arena: Arena,
        pool: MHATokenToKVPool,
        groups: Mapping[str, Sequence[int]],
        *,
        real_data: str,
        max_sequences: int,
        max_tokens: int,
    ) -> None:
        self._device, self._page_size = arena.device, pool.page_size
        self._begin_step, self._end_step = kv_canary.begin_step, kv_canary.end_step
        if arena.device.type != "cpu":
            self.use_kernels()
        keys, values = (_as_words(whole) for whole in (pool.keys, pool.values))
        slots = keys.shape[1]

        def column() -> Tensor:
            return arena.allocate("kv canary", (slots,), torch.int64)

        self._records = {
            name: CanaryRecords(
                marks=column(),
                chains=column(),
                prints=None if real_data == "off" else column(),
                keys=keys,
                values=values,
                layers=torch.tensor(layers, dtype=torch.int32, device=arena.device),
                words=0 if real_data == "all" else PARTIAL_WORDS,
            )
            for name, layers in groups.items()
        }
        self.groups = tuple(groups)
        # Side by side, so that one copy takes all of it to the host.
        self._count, self._ring, self._ends, self._inputs = one_storage(
            arena.device,
            (torch.int32, (1,)),
            (torch.int64, (CAPACITY, len(FIELDS))),
            (torch.int64, (len(groups), max_sequences)),
            (torch.int32, (2, max_tokens)),
            zeroed=True,
        )
        self._firsts = torch.zeros(max_sequences, dtype=torch.int32, device=arena.device)
        self._runs: Tensor | None = None
        self.latest = CanaryFindings(
            violations=(), lost=0, ends=self._ends[:, :0], inputs=self._inputs[:, :0]
        )

    def use_kernels(self) -> None:
        """By Triton, in two launches a step and group."""
        if refusal := triton_available(self._device.type if self._device.type != "cpu" else None):
            raise UnsupportedError(
                f"The KV canary cannot run on {self._device.type}",
                why=refusal.reason,
                remedy=refusal.remedy,
            )
        kernels = import_module("headrace.kernels.kv_canary_triton")
        self._begin_step, self._end_step = kernels.begin_step, kernels.end_step

    # ---- the tap

    def before(self, batch: ForwardBatch) -> None:
        for index, name in enumerate(self.groups):
            self._begin_step(
                self._step(batch, name), self._records[name], self._report(index), group=index
            )

    def after(self, batch: ForwardBatch) -> None:
        for index, name in enumerate(self.groups):
            self._end_step(
                self._step(batch, name), self._records[name], self._report(index), group=index
            )

    def _step(self, batch: ForwardBatch, group: str) -> CanaryStep:
        kv, sequences = batch.kv[group], len(batch.rows)
        return CanaryStep(
            seq_lens=batch.seq_lens,
            firsts=self._firsts[:sequences],
            extend_lens=batch.extend_lens,
            extend_start=batch.extend_start,
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_cache_loc=kv.out_cache_loc,
            page_table=kv.page_table,
            page_size=kv.page_size,
        )

    def _report(self, group: int) -> CanaryReport:
        return CanaryReport(
            count=self._count, ring=self._ring, ends=self._ends[group], inputs=self._inputs
        )

    # ---- the observer

    @contextmanager
    def around(self, run: ForwardRun, evidence: Evidence) -> Iterator[None]:
        runs, self._runs = self._runs, None
        self._count.zero_()
        yield
        if runs is not None:
            self.sweep(runs)
        facts = run.batch.facts
        told = {
            "count": self._count,
            "ring": self._ring,
            "ends": self._ends[:, : facts.sequences],
            "inputs": self._inputs[:, : facts.tokens],
        }
        # A copy behind the step brings it to the host; on the CPU it is handed over as it is, and
        # the next step may run before it is read.
        is_cpu = self._device.type == "cpu"
        evidence.tensors |= {
            f"{self.name}.{name}": each.clone() if is_cpu else each for name, each in told.items()
        }

    def take(self, host: Mapping[str, Tensor]) -> None:
        """Keeps what the step has told as `latest`."""
        count, ring, ends, inputs = (
            host[f"{self.name}.{name}"] for name in ("count", "ring", "ends", "inputs")
        )
        total = int(count)
        lines = ring[: min(total, CAPACITY)].tolist() if total else []
        violations = [self._violation(dict(zip(FIELDS, line, strict=True))) for line in lines]
        violations.sort(key=lambda each: (each.place, each.position, each.stage))
        self.latest = CanaryFindings(
            violations=tuple(violations), lost=max(0, total - CAPACITY), ends=ends, inputs=inputs
        )

    def _violation(self, line: dict[str, int]) -> Violation:
        group = self.groups[line.pop("group")]
        return Violation(group=group, **line)

    # ---- the sweep

    def sweep_next(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """Check whole pages behind the next forward: (the page before it, the page, its index in
        the sequence) each; the first page of a sequence has any page before it."""
        if runs:
            numbers = torch.tensor(runs, dtype=torch.int32).t().contiguous()
            self._runs = to_device(numbers, self._device)

    def sweep(self, runs: Tensor) -> None:
        """Launch the check of `runs`: [3, N] int32, pages before, pages, and their indices."""
        before, page, index = runs.unbind(0)
        is_first = index == 0
        table = torch.stack((torch.where(is_first, page, before), page), dim=1)
        nothing = torch.zeros_like(page)
        step = CanaryStep(
            seq_lens=(index + 1) * self._page_size,
            firsts=index * self._page_size,
            extend_lens=nothing,
            extend_start=nothing,
            input_ids=nothing.long(),
            positions=nothing.long(),
            out_cache_loc=nothing.long(),
            page_table=table,
            page_size=self._page_size,
        )
        unread = torch.empty(len(page), dtype=torch.int64, device=self._device)
        for group, name in enumerate(self.groups):
            report = CanaryReport(
                count=self._count, ring=self._ring, ends=unread, inputs=self._inputs
            )
            self._end_step(step, self._records[name], report, group=group, stage=SWEPT)


def _as_words(whole: Tensor) -> Tensor:
    """[L, P, page, K, D] as [L, slots, words] int32."""
    flat = whole.flatten(3).flatten(1, 2)
    assert flat.shape[2] * flat.element_size() % 4 == 0, "heads have an even number of dimensions"
    return flat.view(torch.int32)
