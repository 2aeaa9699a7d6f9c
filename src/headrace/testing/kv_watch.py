"""What the layers of an engine wrote for one sequence, read from the KV pool after each step.

Keys and values of a layer are a function of its input, so they tell of every layer whether what
came before it was right: on every path, in graphs too, without a tap in the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.engine.engine import Engine
from headrace.runner.worker import SplitStep, StepResult
from headrace.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """A step that served the sequence, just launched.

    Attributes:
        number: of the steps that served it, from 1. kind: mode of the step, of all its sequences.
        tokens, sequences: of the whole step. path: which it took.
        start: length of the sequence before it. length: after it.
        pages: of the sequence, as the host has them.
        table: where a page table on the device says otherwise; "" where it does not.
    """

    number: int
    kind: str
    tokens: int
    sequences: int
    path: str
    start: int
    length: int
    pages: tuple[int, ...]
    table: str = ""

    def __str__(self) -> str:
        step = f"step {self.number} ({self.kind.lower()}, {self.path}, "
        return f"{step}{self.sequences} sequences, {self.tokens} tokens)"


@contextmanager
def watched_steps(
    engine: Engine, request_id: str, take: Callable[[WatchedStep], None]
) -> Iterator[None]:
    """Call `take` after each launch that serves the one sequence of a request, while its pages are
    still its own. What `take` reads of the pool is read on the stream of the step."""
    worker = engine.worker
    launch, advance = worker.forward_batch_generation, worker.advance_split
    count = 0

    def tell(batch: ForwardBatch, bounds: HostBounds, path: str) -> None:
        nonlocal count
        sequence = _scheduled(engine, request_id)
        if sequence is None or sequence.row not in bounds.rows:
            return
        place = bounds.rows.index(sequence.row)
        count += 1
        take(
            WatchedStep(
                number=count,
                kind=batch.mode.name,
                tokens=batch.facts.tokens,
                sequences=batch.facts.sequences,
                path=path,
                start=bounds.prefix_lens[place],
                length=bounds.seq_lens[place],
                pages=tuple(sequence.pages),
                table=_other_pages(engine, sequence, bounds.seq_lens[place]),
            )
        )

    def watched_launch(batch: ForwardBatch) -> StepResult:
        bounds = batch.bounds  # as the scheduler made them
        result = launch(batch)
        tell(batch, bounds, result.path)
        return result

    def watched_advance(step: SplitStep, layers: int) -> StepResult | None:
        result = advance(step, layers)
        if result is not None:  # the last part of a step
            batch = step.forward.batch
            tell(batch, batch.bounds, result.path)
        return result

    worker.forward_batch_generation = watched_launch  # type: ignore[method-assign]
    worker.advance_split = watched_advance  # type: ignore[method-assign]
    try:
        yield
    finally:  # the class's own show again
        del worker.forward_batch_generation, worker.advance_split


def _scheduled(engine: Engine, request_id: str) -> Sequence | None:
    running = engine.scheduler.chooser.running
    return next((each for each in running if each.request.request_id == request_id), None)


def _other_pages(engine: Engine, sequence: Sequence, length: int) -> str:
    """The first place up to a length where a page table differs from what the host has staged."""
    pages = sequence.pages[: -(-length // engine.scheduler.keeper.page_size)]
    for group, table in engine.worker.runner.page_tables.items():
        found = table[sequence.row, : len(pages)].tolist()
        for place, (ours, theirs) in enumerate(zip(found, pages, strict=True)):
            if ours != theirs:
                return f"place {place} of {group} holds page {ours} and not {theirs}"
    return ""


@torch.inference_mode()
def kv_of(engine: Engine, layer: int, step: WatchedStep) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer at positions [0, length): float32 [n, K * D] and [n, K * Dv]."""
    pool = engine.worker.runner.token_to_kv_pool
    pages = torch.tensor(step.pages, dtype=torch.int64, device=engine.worker.runner.device)
    keys, values = pool.key_value(layer)
    return _flat(keys, pages, step.length), _flat(values, pages, step.length)


def _flat(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    return pool[pages].flatten(0, 1)[:length].flatten(1).float()  # [P, page, K, D] -> [n, K * D]
