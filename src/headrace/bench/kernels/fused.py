"""`python -m headrace.bench.kernels.fused`: checks and times the fused kernels on a CUDA device.

For every product of a layer with one row: floor (bytes of weights over the measured copy rate;
reading alone can be faster than that), cuBLAS alone, and the kernel with its fused neighbours at
the settings of the table. `--sweep` tries others, and what it finds belongs into the table.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.bench.kernels.products import DTYPE, PRODUCTS, Product, check, in_processes, rotated
from headrace.bench.kernels.timing import copy_rate, time_calls
from headrace.kernels import matvec as matvec_twin
from headrace.kernels import norm_rope_write as rope_twin
from headrace.kernels import norms as norm_twin
from headrace.kernels.matvec_settings import MatvecSettings, matvec_settings

Arguments = dict[str, Any]
TRIED = [
    MatvecSettings(rows=rows, block=block, warps=warps, **launch)
    for (rows, block, warps), launch in itertools.product(
        [(2, 2048, 4), (2, 2048, 8), (4, 2048, 8), (4, 1024, 4), (2, 1024, 4), (8, 1024, 4)],
        ({}, {"prefetch": True}, {"dependent_launch": False}),
    )
]


def candidates(product: Product, *, sweep: bool) -> list[MatvecSettings]:
    """The table's settings first, then what is tried."""
    first = matvec_settings(product.outputs, product.inputs)
    return [first, *(settings for settings in TRIED if sweep and settings != first)]


def arguments(product: Product, outputs: int) -> Arguments:
    """Random arguments with `outputs` rows of weights."""
    draw = partial(torch.randn, device="cuda", dtype=DTYPE)
    named: Arguments = {
        "x": draw(1, product.inputs),
        "weight": draw(outputs, product.inputs) * product.inputs**-0.5,
        "activation": product.activation,
        "out": torch.full(
            (1, outputs // (2 if product.activation else 1)),
            torch.nan,
            device="cuda",
            dtype=torch.float32 if product.logits else DTYPE,
        ),
    }
    if product.norm:
        named |= {"norm_weight": draw(product.inputs), "eps": 1e-6}
    if product.residual:
        named["residual"] = draw(1, outputs)
    return named


def compile_one(work: tuple[Product, MatvecSettings]) -> None:
    """Runs a variant once on few weights: what it compiles stays in the kernel cache on disk."""
    from headrace.kernels.matvec_triton import matvec

    product, settings = work
    matvec(**arguments(product, 128), settings=settings, pdl=True)
    torch.cuda.synchronize()


def describe(settings: MatvecSettings) -> str:
    launch = " prefetch" if settings.prefetch else ""
    launch = launch if settings.dependent_launch else " in order"
    return f"rows {settings.rows} block {settings.block} warps {settings.warps}{launch}"


def bench_product(product: Product, rate: float, *, sweep: bool) -> bool:
    """Prints a line; False if a result is wrong."""
    from headrace.kernels.matvec_triton import matvec

    named = arguments(product, product.outputs)
    weights = rotated(named["weight"])
    expected = matvec_twin.matvec(**named | {"out": torch.empty_like(named["out"])})
    library = time_calls([partial(F.linear, named["x"], weight) for weight in weights])
    times: dict[MatvecSettings, float] = {}
    right = True
    for settings in candidates(product, sweep=sweep):
        named["out"].fill_(torch.nan)
        call = partial(matvec, **named, settings=settings, pdl=True)
        right &= check(f"{product.name} {describe(settings)}", call(), expected)
        times[settings] = time_calls([partial(call, weight=weight) for weight in weights])
    table, best = next(iter(times)), min(times, key=lambda settings: times[settings])
    print(
        f"{product.name:13}{product.size / rate * 1e6:8.2f}{library:8.2f}{times[table]:8.2f}"
        f"{library / times[table]:8.2f}  {describe(table)}",
        flush=True,
    )
    if best != table:
        print(
            f"{'':13}{'best':>16}{times[best]:8.2f}{library / times[best]:8.2f}  {describe(best)}"
        )
    return right


def small_kernels(tokens: int) -> Iterator[tuple[str, Callable[[], Tensor], Tensor, int]]:
    """Name, call, what it must give, and bytes moved, of the kernels of an 8B layer."""
    from headrace.kernels.gated_activation_triton import gated_activation
    from headrace.kernels.norm_rope_write_triton import norm_rope_write
    from headrace.kernels.norms_triton import rms_norm, sum_rms_norm

    hidden, inner, heads, kv_heads, dim = 4096, 12288, 32, 8, 128
    draw = partial(torch.randn, device="cuda", dtype=DTYPE)
    x, weight, out = draw(tokens, hidden), draw(hidden), draw(tokens, hidden)
    row = tokens * hidden * DTYPE.itemsize
    norm = partial(rms_norm, x, weight, eps=1e-6, out=out, pdl=True)
    yield "rms_norm", norm, norm_twin.rms_norm(x, weight, eps=1e-6), 2 * row
    parts = torch.randn(4, tokens, hidden, device="cuda")
    add = partial(sum_rms_norm, parts, weight, eps=1e-6, dtype=DTYPE, pdl=True)
    expected = norm_twin.sum_rms_norm(parts, weight, eps=1e-6, dtype=DTYPE)[0]
    yield "sum_rms_norm, 4 parts", lambda: add()[0], expected, 10 * row
    both = draw(tokens, 2 * inner)
    gate = partial(gated_activation, both, out=draw(tokens, inner), pdl=True)
    silu = F.silu(both[:, :inner].float()) * both[:, inner:].float()
    yield "gated_activation", gate, silu, 3 * tokens * inner * DTYPE.itemsize
    pages = tokens // 64 + 2
    caches = [draw(pages, 64, kv_heads, dim) for _ in range(2)]
    slots = torch.randperm(pages * 64 - 64, device="cuda")[:tokens] + 64
    positions = torch.randint(2048, (tokens,), device="cuda")
    qkv, table = draw(tokens, (heads + 2 * kv_heads) * dim), torch.randn(2048, dim, device="cuda")
    shared = (qkv, table, positions, *caches, slots)
    norms: Arguments = {"q_norm": draw(dim), "k_norm": draw(dim), "eps": 1e-6}
    expected = rope_twin.norm_rope_write(*shared, **norms)
    rope = partial(norm_rope_write, *shared, **norms, out=draw(tokens, heads, dim), pdl=True)
    yield "norm_rope_write", rope, expected, 2 * qkv.numel() * DTYPE.itemsize


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="products whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="try other settings than the table's")
    asked = parser.parse_args()
    products = [product for product in PRODUCTS if asked.only in product.name]
    if asked.sweep:
        works = [(it, settings) for it in products for settings in candidates(it, sweep=True)]
        in_processes(compile_one, works)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; microseconds, bfloat16")
    print("one row         floor  cuBLAS    ours   ratio  settings")
    right = True
    for product in products:
        right &= bench_product(product, rate, sweep=asked.sweep)
    print("kernel                  tokens   floor    ours")
    for tokens in (1, 32, 256, 4096):
        for name, call, expected, size in small_kernels(tokens):
            right &= check(f"{name} {tokens}", call(), expected)
            time = time_calls([call])
            print(f"{name:24}{tokens:6}{size / rate * 1e6:8.2f}{time:8.2f}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
