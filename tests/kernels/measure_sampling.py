"""Checks and times sampling, decode preparation and advance on a CUDA device; under a minute.

    python tests/kernels/measure_sampling.py [--no-tests]

Times are of one call inside a CUDA graph of many, median over replays, in microseconds; the floor
is reading the logits once at 4.2 TB/s.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from sampling_columns import Row, columns_of, expected
from test_kernels_sampling_gpu import VOCABULARY, buffers, draw

from headrace.kernels import sampling_triton
from headrace.kernels.batch_preparation_triton import advance_decode, prepare_decode
from headrace.kernels.sampling_triton import sample_tokens

CALLS, REPLAYS = 20, 7
KINDS = {
    "greedy": Row(temperature=0.0),
    "temperature": Row(temperature=0.8),
    "penalised": Row(temperature=0.8, presence=0.1, repetition=1.1),
    "top-k 50": Row(top_k=50),
    "top-p .95": Row(top_p=0.95),
    "k 50, p .95": Row(top_k=50, top_p=0.95),
    "min-p .05": Row(min_p=0.05),
}


def microseconds(kernel: Callable[..., None], *arguments: Any, **named: Any) -> float:
    def call() -> None:
        kernel(*arguments, **named)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / CALLS)
    return sorted(times)[REPLAYS // 2]


def sampling(pdl: bool) -> None:
    print(f"\nsampling, V = {VOCABULARY}, pdl {pdl}: flat logits / peaked logits, us")
    print(f"{'':14}" + "".join(f"{f'S={s}':>18}" for s in (1, 32, 256)))
    floors = [s * VOCABULARY * 4 / 4.2e6 for s in (1, 32, 256)]
    print(f"{'floor':14}" + "".join(f"{floor:18.1f}" for floor in floors))
    for name, kind in [*KINDS.items(), ("idle filters", Row(temperature=0.0))]:
        columns = columns_of([kind], VOCABULARY)
        filters = name == "idle filters" or bool(kind.top_k or kind.top_p < 1 or kind.min_p)
        cells = []
        for samples in (1, 32, 256):
            rows = torch.ones(samples, dtype=torch.int64, device="cuda")
            positions = torch.arange(samples, dtype=torch.int32, device="cuda")
            named = buffers(samples) | {"filters": filters, "pdl": pdl}
            pair = []
            for peaked in (False, True):
                logits = draw(samples, 1.3, 1)
                if peaked:
                    logits[:, ::9973] += 14.0
                pair.append(microseconds(sample_tokens, logits, rows, positions, columns, **named))
            cells.append("{:8.1f} /{:8.1f}".format(*pair))
        print(f"{name:14}" + "".join(f"{cell:>18}" for cell in cells))


def programs() -> None:
    print("\nprograms per multiprocessor: greedy and temperature, us")
    chosen = sampling_triton._PROGRAMS_PER_MULTIPROCESSOR
    for count in (4, 8, 12, 16, 24, 32):
        sampling_triton._PROGRAMS_PER_MULTIPROCESSOR = count
        cells = []
        for samples in (32, 256):
            rows = torch.ones(samples, dtype=torch.int64, device="cuda")
            logits = draw(samples, 1.3, 1)
            named = buffers(samples) | {"filters": False}
            for name in ("greedy", "temperature"):
                columns = columns_of([KINDS[name]], VOCABULARY)
                time = microseconds(sample_tokens, logits, rows, rows, columns, **named)
                cells.append(f"S={samples} {name} {time:.1f}")
        print(f"{count:4}  " + "   ".join(cells))
    sampling_triton._PROGRAMS_PER_MULTIPROCESSOR = chosen


def agreement() -> None:
    print("\ntokens that differ from torch's on the device (draws)")
    samples = 64
    rows = torch.ones(samples, dtype=torch.int64, device="cuda")
    out = buffers(samples)
    for name, kind in KINDS.items():
        columns, wrong, draws = columns_of([kind], VOCABULARY), 0, 0
        for round_ in range(6):
            logits = draw(samples, (1.3, 4.0)[round_ % 2], round_)
            logits = logits.bfloat16() if round_ > 3 else logits
            positions = torch.arange(samples, dtype=torch.int32, device="cuda") + 1000 * round_
            sample_tokens(logits, rows, positions, columns, filters=True, **out)
            wrong += int((out["tokens"] != expected(logits, rows, positions, columns)[0]).sum())
            draws += samples
        print(f"{name:14}{wrong:5} of {draws}")


def preparation() -> None:
    print("\nprepare_decode and advance_decode, us")
    for batch, context, page in ((1, 1056, 64), (256, 1056, 64), (256, 32768, 64), (32, 8192, 1)):
        size, pages = batch + 1, -(-(context + 1) // page)
        state = {
            "last_token": torch.zeros(size, dtype=torch.int64, device="cuda"),
            "length": torch.full((size,), context, dtype=torch.int32, device="cuda"),
            "active": torch.ones(size, dtype=torch.bool, device="cuda"),
        }
        rows = torch.arange(1, size, device="cuda")
        table = torch.ones(size, pages, dtype=torch.int32, device="cuda")
        numbers = {name: torch.empty_like(rows) for name in ("input_ids", "positions")}
        lens = torch.empty(batch, dtype=torch.int32, device="cuda")
        gathered, slots = torch.empty_like(table[1:]), torch.empty_like(rows)
        prepare = microseconds(
            prepare_decode,
            rows,
            **state,
            tables={"full": table},
            page_size=page,
            **numbers,
            seq_lens=lens,
            page_tables={"full": gathered},
            out_cache_locs={"full": slots},
        )
        columns = columns_of([Row()] * batch, 1000, stop_ids=128)
        finite = torch.ones(batch, dtype=torch.bool, device="cuda")
        advance = microseconds(
            advance_decode,
            rows,
            numbers["input_ids"],
            finite,
            **state,
            stop_ids=columns.stop_ids,
            penalised=columns.penalised,
            token_counts=columns.token_counts,
        )
        print(f"B={batch:4} context {context:6} page {page:3}: {prepare:6.2f} {advance:6.2f}")


def main() -> None:
    here = Path(__file__).parent
    names = ("sampling_triton", "batch_preparation_triton", "sampling_gpu")
    if "--no-tests" not in sys.argv:
        files = [str(here / f"test_kernels_{name}.py") for name in names]
        pytest.main(["-q", "-m", "gpu or not gpu", *files])
    agreement()
    preparation()
    sampling(pdl=False)
    programs()
    if torch.cuda.get_device_capability() >= (9, 0):
        sampling(pdl=True)


if __name__ == "__main__":
    main()
