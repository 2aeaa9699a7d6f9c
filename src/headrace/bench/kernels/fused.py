"""`python -m headrace.bench.kernels.fused`: checks and times the fused kernels on a CUDA device.

For every product of a model's layer: floor (bytes of weights over the measured copy rate), cuBLAS
alone, the kernel with its fused neighbours at its own settings, and the best of the settings tried.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.bench.kernels.timing import copies_of, copy_rate, time_calls
from headrace.kernels import norm_rope_write as rope_twin
from headrace.kernels import norms as norm_twin
from headrace.kernels import small_linear as linear_twin
from headrace.kernels.gated_activation import Activation
from headrace.kernels.small_linear_settings import (
    MatvecSettings,
    ThinSettings,
    matvec_settings,
    thin_settings,
)

Settings = MatvecSettings | ThinSettings
Arguments = dict[str, Any]
DTYPE = torch.bfloat16
TOLERANCE = 1e-2  # |out - twin| / |twin|; bfloat16 rounds to about 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of a layer and what is fused with it: weights [outputs, inputs]."""

    name: str
    outputs: int
    inputs: int
    norm: bool = False
    residual: bool = False
    activation: Activation | None = None


PRODUCTS = [
    Product(name="8B qkv", outputs=6144, inputs=4096, norm=True),
    Product(name="8B o", outputs=4096, inputs=4096, residual=True),
    Product(name="8B gate up", outputs=24576, inputs=4096, norm=True, activation="silu"),
    Product(name="8B down", outputs=4096, inputs=12288, residual=True),
    Product(name="0.6B qkv", outputs=4096, inputs=1024, norm=True),
    Product(name="0.6B o", outputs=1024, inputs=2048, residual=True),
    Product(name="0.6B gate up", outputs=6144, inputs=1024, norm=True, activation="silu"),
    Product(name="0.6B down", outputs=1024, inputs=3072, residual=True),
    Product(name="8B head", outputs=151936, inputs=4096, norm=True),
]
MATVEC = [
    MatvecSettings(rows=rows, block=block, warps=warps, prefetch=prefetch)
    for (rows, block, warps), prefetch in itertools.product(
        [(2, 2048, 4), (2, 2048, 8), (4, 2048, 8), (4, 1024, 4), (2, 1024, 4), (8, 1024, 4)],
        (False, True),
    )
]
THIN = [
    ThinSettings(block=block, depth=depth, warps=warps, stages=stages, prefetch=prefetch)
    for (block, depth, warps, stages), prefetch in itertools.product(
        [(16, 256, 4, 4), (16, 256, 2, 4), (16, 512, 4, 3), (32, 128, 4, 5), (32, 256, 4, 4)],
        (False, True),
    )
]


def default_settings(product: Product, rows: int) -> Settings:
    shape = product.outputs, product.inputs
    return matvec_settings(*shape) if rows == 1 else thin_settings(*shape, DTYPE.itemsize)


def candidates(product: Product, rows: int, sweep: bool) -> list[Settings]:
    """The default first, then what is tried."""
    first = default_settings(product, rows)
    rest: Iterable[Settings] = MATVEC if rows == 1 else THIN
    return [first, *(settings for settings in rest if sweep and settings != first)]


def arguments(product: Product, rows: int, outputs: int) -> Arguments:
    """Random arguments with `outputs` rows of weights."""
    draw = partial(torch.randn, device="cuda", dtype=DTYPE)
    named: Arguments = {
        "x": draw(rows, product.inputs),
        "weight": draw(outputs, product.inputs) * product.inputs**-0.5,
        "activation": product.activation,
    }
    if product.norm:
        named |= {"norm_weight": draw(product.inputs), "eps": 1e-6}
    if product.residual:
        named["residual"] = draw(rows, outputs)
    return named


def compile_one(work: tuple[Product, int, Settings, bool]) -> None:
    """Runs a variant once on few weights: what it compiles stays in the kernel cache on disk."""
    from headrace.kernels.small_linear_triton import small_linear

    product, rows, settings, pdl = work
    small_linear(**arguments(product, rows, 128), settings=settings, pdl=pdl)
    torch.cuda.synchronize()


def compile_all(works: list[tuple[Product, int, Settings, bool]]) -> None:
    processes = min(14, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        list(pool.map(compile_one, works, chunksize=4))


def check(name: str, out: Tensor, expected: Tensor) -> bool:
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    if not error < TOLERANCE:
        print(f"WRONG {name}: relative error {error:.2e}")
    return error < TOLERANCE


def describe(settings: Settings) -> str:
    prefetch = " prefetch" if settings.prefetch else ""
    if isinstance(settings, MatvecSettings):
        return f"rows {settings.rows} block {settings.block} warps {settings.warps}{prefetch}"
    shape = f"block {settings.block} depth {settings.depth}"
    return f"{shape} warps {settings.warps} stages {settings.stages}{prefetch}"


def bench_product(product: Product, rows: list[int], rate: float, sweep: bool) -> bool:
    """Prints a line for each number of rows; False if a result is wrong."""
    size = product.outputs * product.inputs * DTYPE.itemsize
    weight = arguments(product, 1, product.outputs)["weight"]
    weights = [weight, *(weight.clone() for _ in range(copies_of(size) - 1))]
    right, best_thin = True, None
    for count in rows:
        named = arguments(product, count, product.outputs) | {"weight": weight}
        tried = candidates(product, count, sweep and (count == 1 or best_thin is None))
        if count > 1 and best_thin is not None:
            tried.append(best_thin)  # found once: any number of rows takes the same kernel
        times: dict[Settings, float] = {}
        for settings in tried:
            times[settings], agrees = time_variant(named, weights, settings, pdl=True)
            right &= agrees
        plain, agrees = time_variant(named, weights, tried[0], pdl=False)
        right &= agrees
        best = min(times, key=lambda settings: times[settings])
        if count > 1:
            best_thin = best_thin or best
        library = time_calls([partial(F.linear, named["x"], weight) for weight in weights])
        print(
            f"{product.name:13}{count:3}{size / rate * 1e6:8.2f}{library:8.2f}{plain:8.2f}"
            f"{times[tried[0]]:8.2f}{times[best]:8.2f}  {describe(best)}",
            flush=True,
        )
    return right


def time_variant(
    named: Arguments, weights: list[Tensor], settings: Settings, *, pdl: bool
) -> tuple[float, bool]:
    """Microseconds, and whether the result is right."""
    from headrace.kernels.small_linear_triton import small_linear

    expected = linear_twin.small_linear(**named)
    out = torch.full_like(expected, torch.nan)
    call = partial(small_linear, **named, out=out, settings=settings, pdl=pdl)
    agrees = check(f"{tuple(named['x'].shape)} {settings} pdl={pdl}", call(), expected)
    return time_calls([partial(call, weight=weight) for weight in weights]), agrees


def small_kernels(tokens: int) -> Iterator[tuple[str, Callable[[], Tensor], Tensor, int]]:
    """Name, call, what it must give, and bytes moved, of the kernels of an 8B layer."""
    from headrace.kernels.gated_activation_triton import gated_activation
    from headrace.kernels.norm_rope_write_triton import norm_rope_write
    from headrace.kernels.norms_triton import add_rms_norm, rms_norm

    hidden, inner, heads, kv_heads, dim = 4096, 12288, 32, 8, 128
    draw = partial(torch.randn, device="cuda", dtype=DTYPE)
    x, residual, weight = draw(tokens, hidden), draw(tokens, hidden), draw(hidden)
    row = tokens * hidden * DTYPE.itemsize
    out, total = torch.empty_like(x), torch.empty_like(x)
    norm = partial(rms_norm, x, weight, eps=1e-6, out=out, pdl=True)
    yield "rms_norm", norm, norm_twin.rms_norm(x, weight, eps=1e-6), 2 * row
    add = partial(add_rms_norm, x, residual, weight, eps=1e-6, out=out, total=total, pdl=True)
    expected = norm_twin.add_rms_norm(x, residual, weight, eps=1e-6)[0]
    yield "add_rms_norm", lambda: add()[0], expected, 4 * row
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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 2, 16], help="rows of x")
    parser.add_argument("--only", default="", help="products whose name contains this")
    parser.add_argument("--quick", action="store_true", help="the settings of the table alone")
    asked = parser.parse_args()
    products = [product for product in PRODUCTS if asked.only in product.name]
    rows: list[int] = asked.rows
    works = {
        (replace(product, name=""), min(count, 2), settings, pdl)
        for product in products
        for count in rows
        for settings in candidates(product, count, not asked.quick)
        for pdl in (True, *((False,) if settings == default_settings(product, count) else ()))
    }
    compile_all(sorted(works, key=repr))
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; microseconds, bfloat16")
    print("product        m   floor  cuBLAS   plain     pdl    best  best settings (with pdl)")
    right = True
    for product in products:
        right &= bench_product(product, rows, rate, not asked.quick)
    print("kernel              tokens   floor     pdl")
    for tokens in (1, 32, 256, 4096):
        for name, call, expected, size in small_kernels(tokens):
            right &= check(f"{name} {tokens}", call(), expected)
            time = time_calls([call])
            print(f"{name:20}{tokens:6}{size / rate * 1e6:8.2f}{time:8.2f}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
