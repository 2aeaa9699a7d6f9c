"""`python -m headrace.bench.kernels.kv_canary`: checks and times the KV canary on a CUDA device.

Decode steps over a pool of Qwen3-8B's shape: what the two launches take, and the floor, which is
the bytes that they must read at the day's copy rate. Memory comes in sectors of 32 bytes, so the
first 16 bytes of a slot's keys cost 32. `--sweep` tries other sizes of the programs.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from headrace.bench.kernels.timing import copy_rate, time_calls
from headrace.execution.replacing import replaced
from headrace.kernels import kv_canary_triton
from headrace.kernels.kv_canary import (
    FIELDS,
    PARTIAL_WORDS,
    CanaryRecords,
    CanaryReport,
    CanaryStep,
)

LAYERS, KV_HEADS, HEAD_DIM, PAGE = 36, 8, 128, 64
SHAPES = ((32, 1056), (1, 8192), (8, 8192), (128, 1056))  # sequences, tokens of each
REAL_DATA = ("off", "partial", "all")
STEP_MS = 5.7  # a decode step of Qwen3-8B with 32 sequences of 1056 tokens on an H200
SECTOR, CHUNK = 32, 1024
TRIED = [(block, programs) for block in (32, 64) for programs in (1024, 2048, 4096)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sequences that decode, with their records stamped."""

    step: CanaryStep
    records: CanaryRecords
    report: CanaryReport

    def begin(self) -> None:
        kv_canary_triton.begin_step(self.step, self.records, self.report)

    def end(self) -> None:
        kv_canary_triton.end_step(self.step, self.records, self.report)


def settings(sequences: int, length: int) -> Iterator[tuple[str, Setting]]:
    """One for each amount of real data, over one pool."""
    pages = -(-length // PAGE)
    slots = (1 + sequences * pages) * PAGE
    shape = (LAYERS, slots, KV_HEADS * HEAD_DIM * 2 // 4)
    keys, values = (torch.zeros(shape, dtype=torch.int32, device="cuda") for _ in range(2))
    for plane in (*keys, *values):
        plane.random_()
    order = torch.randperm(sequences * pages, device="cuda") + 1
    table = order.view(sequences, pages).int()
    columns = torch.zeros(3, slots, dtype=torch.int64, device="cuda")
    records = CanaryRecords(
        marks=columns[0],
        chains=columns[1],
        prints=columns[2],
        keys=keys,
        values=values,
        layers=torch.arange(LAYERS, dtype=torch.int32, device="cuda"),
    )
    report = CanaryReport(
        count=torch.zeros(1, dtype=torch.int32, device="cuda"),
        ring=torch.zeros(256, len(FIELDS), dtype=torch.int64, device="cuda"),
        ends=torch.zeros(sequences, dtype=torch.int64, device="cuda"),
        inputs=torch.zeros(2, sequences * CHUNK, dtype=torch.int32, device="cuda"),
    )
    for real_data in REAL_DATA:
        looked = replace(
            records,
            prints=None if real_data == "off" else records.prints,
            words=0 if real_data == "all" else PARTIAL_WORDS,
        )
        for first in range(0, length - 1, CHUNK):
            step = prompt_step(table, first, min(CHUNK, length - 1 - first))
            kv_canary_triton.begin_step(step, looked, report)
            kv_canary_triton.end_step(step, looked, report)
        step = replace(prompt_step(table, length - 1, 1), extend_lens=None, extend_start=None)
        yield real_data, Setting(step=step, records=looked, report=report)


def prompt_step(table: torch.Tensor, first: int, new: int) -> CanaryStep:
    """`new` more tokens of every sequence."""
    sequences = table.shape[0]
    positions = torch.arange(first, first + new, device="cuda").repeat(sequences)
    owner = torch.arange(sequences, device="cuda").repeat_interleave(new)
    starts = torch.arange(sequences, dtype=torch.int32, device="cuda")
    return CanaryStep(
        seq_lens=torch.full_like(starts, first + new),
        firsts=torch.zeros_like(starts),
        extend_lens=torch.full_like(starts, new),
        extend_start=starts * new,
        input_ids=positions % 1000 + owner,
        positions=positions,
        out_cache_loc=table[owner, positions // PAGE].long() * PAGE + positions % PAGE,
        page_table=table,
        page_size=PAGE,
    )


def read_bytes(tokens: int, real_data: str) -> int:
    """Of one step: marks and chains twice, the token before each in the cache; fingerprints once,
    and what they are of."""
    records = 2 * 2 * 8 * tokens
    if real_data == "off":
        return records
    whole = KV_HEADS * HEAD_DIM * 2
    data = 2 * LAYERS * (SECTOR if real_data == "partial" else whole)
    return records + (8 + data) * tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="other sizes of programs too")
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copies {rate / 1e12:.2f} TB/s")
    print("sequences tokens real_data  block programs  before us  after us  floor us  of 5.7 ms")
    wrong = 0
    for sequences, length in SHAPES:
        for real_data, setting in settings(sequences, length):
            floor = read_bytes(sequences * length, real_data) / rate * 1e6
            own = (kv_canary_triton._BLOCK, kv_canary_triton._PROGRAMS)
            others = [each for each in TRIED if arguments.sweep and each != own]
            for block, programs in (own, *others):
                sizes = (("_BLOCK", block), ("_PROGRAMS", programs))
                with replaced([(kv_canary_triton, name, size) for name, size in sizes]):
                    before, after = (time_calls([call]) for call in (setting.begin, setting.end))
                share = f"{(before + after) / STEP_MS / 10:.2f} %" if sequences == 32 else "-"
                print(
                    f"{sequences:>9}{length:>7} {real_data:<9}{block:>7}{programs:>9}"
                    f"{before:>11.1f}{after:>10.1f}{floor:>10.1f}{share:>11}"
                )
            found = int(setting.report.count)
            if found:
                print(f"WRONG: {found} violations where there are none")
                wrong = 1
            victim = setting.step.page_table[0, 1].long() * PAGE
            setting.records.chains[victim] += 1
            setting.end()
            if int(setting.report.count) != 2:
                print(f"WRONG: {int(setting.report.count)} violations where two are")
                wrong = 1
            setting.records.chains[victim] -= 1
            setting.report.count.zero_()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
