"""`python -m headrace.bench.kernels.attention_backends`: one layer's attention, backend by backend.

Decode steps as a captured graph has them (kernels that serve every length up to the longest) and
as an eager step has them (sizes from the lengths), and a step of prompts. Every result is compared
with `torch_native`'s first. Exit code 1 if one is wrong or nothing was timed.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.capabilities import AttentionNeed, Phase
from headrace.attention.selection import backend_refusals, build_attention_backend
from headrace.base.errors import HeadraceError
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.protocols import KvPool
from headrace.bench.kernels.timing import copies_of, time_calls
from headrace.config.persona import AttentionTraits, KvGroupTraits, KvKind
from headrace.runner.detect import detect

DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
LONGEST = 4096
TOLERANCE = 1e-2  # |out - reference| / |reference|
GROUP = KvGroupTraits(name="full", kind=KvKind.FULL, window=None, layers=(0,))
ATTENTION = AttentionTraits(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM, scale=DIM**-0.5
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows of one length. `graph`: the backend is made ready as for a captured graph."""

    rows: int
    length: int
    decode: bool
    graph: bool = False

    def __str__(self) -> str:
        kind = "prompts" if not self.decode else "decode graph" if self.graph else "decode eager"
        return f"{kind} {self.rows} x {self.length}"


CASES = (
    *(
        Case(rows=rows, length=1024, decode=True, graph=graph)
        for graph in (True, False)
        for rows in (1, 32, 128)
    ),
    Case(rows=8, length=1024, decode=False),
)


@dataclass(kw_only=True)
class Pool:
    """Keys and values of layers that take turns, more than the cache holds."""

    layers: list[tuple[Tensor, Tensor]]  # [P, page, K, D] each
    page_size: int = PAGE

    def key_value(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        raise AssertionError("backends only read")


@dataclass(kw_only=True)
class Layer:
    pool: KvPool
    pool_layer: int
    layer_id: int = 0
    kv_group: str = GROUP.name
    num_heads: int = HEADS
    num_kv_heads: int = KV_HEADS
    head_dim: int = DIM
    v_head_dim: int = DIM
    scale: float = ATTENTION.scale
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None


def make(case: Case) -> tuple[ForwardBatch, Tensor, list[Layer]]:
    """The step of a case, its queries [T, N, D] and its layers."""
    pages = -(-case.length // PAGE)
    count = case.rows * pages + 1
    copies = copies_of(2 * count * PAGE * KV_HEADS * DIM * DTYPE.itemsize)
    shape = (count, PAGE, KV_HEADS, DIM)
    pool = Pool(
        layers=[
            (
                torch.randn(shape, dtype=DTYPE, device=DEVICE),
                torch.randn(shape, dtype=DTYPE, device=DEVICE),
            )
            for _ in range(copies)
        ]
    )
    order = torch.randperm(count - 1, device=DEVICE).to(torch.int32) + 1
    new = 1 if case.decode else case.length
    tokens = case.rows * new
    mode = ForwardMode.DECODE if case.decode else ForwardMode.EXTEND
    lengths = torch.full((case.rows,), case.length, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(case.rows, dtype=torch.int32, device=DEVICE) * new
    batch = ForwardBatch(
        mode=mode,
        rows=torch.arange(case.rows, device=DEVICE),
        bounds=HostBounds(seq_lens=[case.length] * case.rows, extend_lens=[new] * case.rows),
        facts=BatchFacts(
            mode=mode,
            tokens=tokens,
            live_tokens=tokens,
            sequences=case.rows,
            max_length=case.length,
        ),
        seq_lens=lengths,
        extend_lens=None if case.decode else lengths,
        prefix_lens=None if case.decode else torch.zeros_like(lengths),
        extend_start=None if case.decode else starts,
        kv={
            GROUP.name: KvGroup(
                name=GROUP.name,
                page_size=PAGE,
                page_table=order.view(case.rows, pages),
                out_cache_loc=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            )
        },
    )
    q = torch.randn(tokens, HEADS, DIM, dtype=DTYPE, device=DEVICE)
    return batch, q, [Layer(pool=pool, pool_layer=layer) for layer in range(copies)]


def backend_of(name: str, case: Case, *, deterministic: bool = False) -> AttentionBackend:
    setting = AttentionSetting(
        group=GROUP,
        attention=ATTENTION,
        page_size=PAGE,
        max_sequences=case.rows,
        max_model_len=LONGEST,
        dtype=DTYPE,
        device=DEVICE,
    )
    return build_attention_backend(name, name, setting, deterministic=deterministic)


def measure(name: str, case: Case, *, deterministic: bool = False) -> float:
    """Microseconds of one layer. Raises where the result is wrong."""
    batch, q, layers = make(case)
    reference = backend_of("torch_native", case)
    reference.prepare_metadata(batch)
    expected = reference.forward(q, layers[0], batch).float()
    backend = backend_of(name, case, deterministic=deterministic)
    if case.graph:
        backend.capture_buffers(Bucket(tokens=case.rows, sequences=case.rows))
        backend.prepare_metadata_in_graph(batch)
    else:
        backend.prepare_metadata(batch)
    error = backend.forward(q, layers[0], batch).float().sub_(expected).norm() / expected.norm()
    if not error < TOLERANCE:  # NaN is wrong as well
        raise ArithmeticError(f"off by {float(error):.3g}")
    calls: list[Callable[[], object]] = [
        partial(backend.forward, q, layer, batch, out=torch.empty_like(q)) for layer in layers
    ]
    return time_calls(calls)


def rate(case: Case, microseconds: float) -> str:
    """Of decode, bytes of keys and values a second; of prompts, operations a second."""
    if case.decode:
        moved = case.rows * case.length * KV_HEADS * DIM * 2 * DTYPE.itemsize
        return f"{moved / microseconds / 1e6:.2f} TB/s"
    operations = 2 * case.rows * case.length**2 * HEADS * DIM  # half of two products
    return f"{operations / microseconds / 1e6:.0f} TFLOP/s"


def refusal(name: str) -> str:
    """Why this machine or shape is not for a backend; empty when it is."""
    need = AttentionNeed.of(
        Phase.DECODE, GROUP, ATTENTION, dtype="bfloat16", kv_dtype="bfloat16", page_size=PAGE
    )
    return "; ".join(found.reason for found in backend_refusals(name, need, detect("cuda")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="attention_backends")
    parser.add_argument("--backends", nargs="+", default=["triton", "flashinfer", "fa3"])
    names = parser.parse_args().backends
    print(f"{HEADS}/{KV_HEADS} heads of {DIM}, {DTYPE}, page {PAGE}, graphs for {LONGEST} tokens")
    refused = {name: reason for name in names if (reason := refusal(name))}
    for name, reason in refused.items():
        print(f"{name}: {reason}")
    timed = wrong = 0
    for case in CASES:
        cells = []
        for name in (name for name in names if name not in refused):
            try:
                microseconds = measure(name, case)
            except (HeadraceError, ArithmeticError, RuntimeError) as error:
                cells.append(f"{name} FAILED {type(error).__name__}: {str(error)[:200]}")
                wrong += 1
                continue
            cells.append(f"{name} {microseconds:8.1f} us {rate(case, microseconds):>12}")
            timed += 1
        print(f"{case!s:24}", " | ".join(cells), flush=True)
    return int(wrong > 0 or timed == 0)


if __name__ == "__main__":
    sys.exit(main())
