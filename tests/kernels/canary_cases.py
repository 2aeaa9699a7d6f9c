"""Pools, page tables and steps for the KV canary's kernels."""

import random
from dataclasses import dataclass, replace

import torch

from headrace.kernels import kv_canary
from headrace.kernels.kv_canary import CanaryRecords, CanaryReport, CanaryStep

VOCAB = 1000
CAPACITY = 64


@dataclass
class Pool:
    """A pool whose tokens and lengths the test knows."""

    page_size: int
    keys: torch.Tensor
    values: torch.Tensor
    records: CanaryRecords
    table: torch.Tensor  # [sequences, pages]
    lengths: list[int]
    tokens: list[list[int]]

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def report(self, tokens: int = 512) -> CanaryReport:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return CanaryReport(
            count=zeros(1, dtype=torch.int32),
            ring=zeros(CAPACITY, len(kv_canary.FIELDS)),
            ends=torch.full_like(zeros(64), -1),
            inputs=torch.full_like(zeros(2, tokens, dtype=torch.int32), -1),
        )

    def copy(self) -> "Pool":
        records = self.records
        keys, values = self.keys.clone(), self.values.clone()
        fresh = replace(
            records,
            marks=records.marks.clone(),
            chains=records.chains.clone(),
            prints=None if records.prints is None else records.prints.clone(),
            keys=words(keys),
            values=words(values),
        )
        return replace(
            self,
            keys=keys,
            values=values,
            records=fresh,
            table=self.table.clone(),
            lengths=list(self.lengths),
            tokens=[list(each) for each in self.tokens],
        )

    def slot(self, sequence: int, position: int) -> int:
        page = int(self.table[sequence, position // self.page_size])
        return page * self.page_size + position % self.page_size


def words(pool: torch.Tensor) -> torch.Tensor:
    """[L, P, page, K, D] as [L, slots, words] int32."""
    return pool.flatten(3).flatten(1, 2).view(torch.int32)


def make_pool(
    sequences: int,
    *,
    page_size: int = 4,
    pages: int = 64,
    layers: tuple[int, ...] = (0, 1, 2),
    heads: int = 2,
    dims: tuple[int, int] = (16, 8),
    dtype: torch.dtype = torch.bfloat16,
    real_data: str = "partial",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Pool:
    """Nothing is written yet; each sequence has pages of its own, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    each = (pages - 1) // sequences
    order = torch.randperm(pages - 1, generator=generator) + 1
    table = order[: each * sequences].view(sequences, each).to(torch.int32).to(device)
    tensors = [
        torch.randn(max(layers) + 2, pages, page_size, heads, dim, generator=generator)
        .to(dtype)
        .to(device)
        for dim in dims
    ]
    slots = pages * page_size

    def column() -> torch.Tensor:
        return torch.zeros(slots, dtype=torch.int64, device=device)

    return Pool(
        page_size=page_size,
        keys=tensors[0],
        values=tensors[1],
        records=CanaryRecords(
            marks=column(),
            chains=column(),
            prints=None if real_data == "off" else column(),
            keys=words(tensors[0]),
            values=words(tensors[1]),
            layers=torch.tensor(layers, dtype=torch.int32, device=device),
            words=0 if real_data == "all" else kv_canary.PARTIAL_WORDS,
        ),
        table=table,
        lengths=[0] * sequences,
        tokens=[[] for _ in range(sequences)],
    )


def make_step(
    pool: Pool, new: list[int], draw: random.Random, *, ended: tuple[int, ...] = ()
) -> CanaryStep:
    """The next tokens of each sequence; those in `ended` are not active. Lengths grow."""
    decode = all(count == 1 for count in new)
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for sequence, count in enumerate(new):
        begin = pool.lengths[sequence]
        fed = [draw.randrange(VOCAB) for _ in range(count)]
        ids += fed
        positions += range(begin, begin + count)
        if sequence in ended:
            slots += [0] * count
            continue
        slots += [pool.slot(sequence, begin + index) for index in range(count)]
        pool.tokens[sequence] += fed
        pool.lengths[sequence] += count

    def tensor(numbers: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=pool.device)

    live = [0 if place in ended else 1 for place in range(len(new))]
    starts = [sum(new[:place]) for place in range(len(new))]
    lengths = [length * is_live for length, is_live in zip(pool.lengths, live, strict=True)]
    extends = [count * is_live for count, is_live in zip(new, live, strict=True)]
    return CanaryStep(
        seq_lens=tensor(lengths, torch.int32),
        firsts=tensor([0] * len(new), torch.int32),
        extend_lens=None if decode else tensor(extends, torch.int32),
        extend_start=None if decode else tensor(starts, torch.int32),
        input_ids=tensor(ids, torch.int64),
        positions=tensor(positions, torch.int64),
        out_cache_loc=tensor(slots, torch.int64),
        page_table=pool.table,
        page_size=pool.page_size,
    )


def write_model_output(pool: Pool, step: CanaryStep, seed: int) -> None:
    """New keys and values at the slots of the step, as a model's layers write them."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (pool.keys, pool.values):
        shape = (tensor.shape[0], len(step.out_cache_loc), *tensor.shape[3:])
        fresh = torch.randn(shape, generator=generator).to(tensor.dtype).to(tensor.device)
        tensor.flatten(1, 2)[:, step.out_cache_loc] = fresh


def found(report: CanaryReport) -> list[dict[str, int]]:
    """Violations in the order of their fields."""
    lines = report.ring[: min(int(report.count), CAPACITY)].tolist()
    return [dict(zip(kv_canary.FIELDS, line, strict=True)) for line in sorted(lines)]
