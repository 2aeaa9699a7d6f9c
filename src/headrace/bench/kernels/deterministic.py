"""`python -m headrace.bench.kernels.deterministic`: what batch-invariant kernels cost on a GPU.

Products as a layer asks for them, each with the kernel that reads it, by the operators of the mode
and by the default ones; attention by the backend `triton` of both. Every tile of a product is held
against the bits of 8,192 rows first. Beside the tile that the rule or the table chooses the fastest
of some others is told (`--tiles` prints all), and then as the table of
`kernels/invariant_product_settings.py` has it. Exit code 1 if a bit or a result is wrong.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.bench.kernels import attention_backends, few_rows
from headrace.bench.kernels.attention_backends import Case
from headrace.bench.kernels.few_rows import COMPILED, NORM, draw, library_call, reader
from headrace.bench.kernels.products import (
    DTYPE,
    HEAD_DIM,
    PRODUCTS,
    Product,
    check,
    in_processes,
    rotated,
)
from headrace.bench.kernels.timing import copy_rate, time_calls, time_long_call
from headrace.kernels import few_rows as twin
from headrace.kernels.few_rows_settings import FewRowsSettings
from headrace.kernels.invariant_product_settings import MANY as MANY_ROWS
from headrace.kernels.invariant_product_settings import ProductSettings, Settings, product_settings

LIMITS = {1: 16, 32: 64, 128: 128, 256: 256, 1024: 1024, 8192: MANY_ROWS}
"""Rows that are timed -> rows up to which their tile would stand in the table."""
ROWS = tuple(LIMITS)
MOST = max(ROWS)
HEAD_ROWS = 256  # logits of more are gigabytes
LONG = 1024  # rows from which on calls are long
ATTENTION = (
    *(Case(rows=rows, length=1024, decode=True, graph=True) for rows in (1, 32, 128)),
    Case(rows=8, length=1024, decode=False),
)

Shape = tuple[int, int, int, int, int]  # tokens, weights, block, stages, warps
FEW: tuple[Shape, ...] = (
    *((64, 16, 128, 5, 4), (64, 16, 128, 10, 4), (64, 16, 256, 5, 4)),
    *((64, 32, 128, 4, 4), (64, 32, 128, 9, 4), (64, 32, 256, 4, 4)),
    *((64, 64, 128, 3, 4), (64, 64, 128, 6, 4), (64, 64, 64, 4, 4)),
    *((64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (64, 128, 128, 4, 4), (64, 256, 64, 5, 4)),
)
SOME: tuple[Shape, ...] = (
    *((128, 32, 64, 5, 8), (128, 32, 64, 10, 8), (128, 32, 128, 5, 8), (128, 32, 128, 5, 4)),
    *((128, 64, 64, 4, 8), (128, 64, 64, 9, 8), (128, 64, 128, 4, 8)),
    *((128, 128, 64, 3, 8), (128, 128, 64, 6, 8), (128, 128, 64, 3, 4), (128, 256, 64, 4, 8)),
)
MANY: tuple[Shape, ...] = (
    *((128, 64, 64, 4, 8), (128, 128, 64, 3, 4), (128, 128, 64, 3, 8), (128, 128, 64, 6, 8)),
    *((128, 256, 64, 3, 8), (128, 256, 64, 4, 8)),
)
PERSISTENT: tuple[Shape, ...] = (
    *((128, 128, 64, 4, 8), (128, 256, 64, 3, 8), (128, 256, 64, 4, 8)),
)


def tiles(product: Product, rows: int) -> list[Settings]:
    """The chosen one first, then others."""
    gated = product.activation is not None
    chosen = product_settings(
        rows,
        product.outputs,
        product.inputs,
        gated=gated,
        dtype=DTYPE,
        device=torch.device("cuda"),
    )
    shapes = FEW if rows <= 64 else SOME if rows <= 128 else MANY
    found: list[Settings] = [chosen]
    if rows <= 64:
        left = (
            ((128, 128, 5), (256, 64, 4)) if gated else ((64, 256, 4), (64, 128, 8), (128, 128, 5))
        )
        for weights, block, stages in left:
            found.append(
                FewRowsSettings(weights=weights, block=block, warps=4, stages=stages, prefetch=256)
            )
    for (tokens, weights, block, stages, warps), persistent in (
        *((shape, False) for shape in shapes),
        *((shape, True) for shape in (PERSISTENT if rows > 128 and not product.logits else ())),
    ):
        if gated and weights < 32:
            continue
        tile = ProductSettings(
            tokens=tokens,
            weights=weights,
            block=block,
            stages=stages,
            warps=warps,
            prefetch=128 if rows <= 128 else 0,
            persistent=persistent,
        )
        found.append(tile)
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kernel to compile: of the mode, or without a tile those of the default operators."""

    product: Product
    rows: int
    tile: Settings | None


def named_arguments(product: Product, rows: int, outputs: int) -> dict[str, Any]:
    """What both kinds of product take, beside the weights of `outputs` results."""
    return {
        "x": draw(rows, product.inputs) * 0.5,
        "residual": draw(rows, outputs) if product.residual else None,
        "activation": product.activation,
        "dtype": torch.float32 if product.logits else None,
        "pdl": True,
    }


def compile_one(work: Work | Case) -> None:
    """Runs once, on little data, what a product or attention is compiled for."""
    if isinstance(work, Work):
        compile_product(work)
        return
    try:
        for deterministic in (False, True):
            attention_backends.measure(
                "triton", replace(work, length=128), deterministic=deterministic
            )
    except Exception as error:  # timing it tells it again
        print(f"{work}: {error}", file=sys.stderr)


def compile_product(work: Work) -> None:
    from headrace.kernels.invariant_product_triton import invariant_product

    product = work.product
    weight = draw(COMPILED * (2 if product.activation else 1), product.inputs)
    try:
        if work.tile is not None:
            named = named_arguments(product, work.rows, COMPILED)
            invariant_product(weight=weight, **named, settings=work.tile)
        elif work.rows == 1:
            one_row(product, weight)(weight)
        elif work.rows <= 128 and few_rows.chosen(product, work.rows) is not None:
            few_rows.compile_one((product, work.rows))
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler raises; timing it tells it again
        print(f"{product.name}, {work.rows} rows, {work.tile}: {error}", file=sys.stderr)


def one_row(product: Product, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The matrix-vector product of the default operators, the norm in front included."""
    from headrace.kernels.matvec_triton import matvec

    outputs = weight.shape[0] // (2 if product.activation else 1)
    named = named_arguments(product, 1, outputs)
    if named.pop("dtype") is not None:
        named["out"] = draw(1, outputs).float()
    if product.norm:
        named |= {"norm_weight": draw(product.inputs), "eps": 1e-6}
    return lambda it: matvec(weight=it, **named)


def normed(product: Product, rows: int, x: Tensor) -> Callable[[], object]:
    """The norm in front, where a product of more rows has it as a kernel of its own."""
    from headrace.kernels.norms_triton import rms_norm

    weight = draw(product.inputs)
    return (lambda: rms_norm(x, weight, **NORM)) if product.norm else (lambda: None)


def default_call(product: Product, rows: int, weight: Tensor) -> Callable[[Tensor], object]:
    """Norm, product and reader of the default operators; takes the weights."""
    from headrace.kernels.few_rows_triton import few_rows as multiply

    read = reader(product, rows)
    if rows == 1:
        call = one_row(product, weight)
        return lambda it: read(call(it))
    settings = few_rows.chosen(product, rows) if rows <= 128 else None
    front = normed(product, rows, draw(rows, product.inputs))
    if settings is None:
        library = library_call(product, rows)
        return lambda it: (front(), read(library(it)))
    named = few_rows.arguments(product, rows, product.outputs, settings)
    return lambda it: (front(), read(multiply(weight=it, **named)))


def own_call(
    product: Product, rows: int, named: dict[str, Any], tile: Settings
) -> Callable[[Tensor], object]:
    """Norm, product and reader of the deterministic operators; takes the weights."""
    from headrace.kernels.invariant_product_triton import invariant_product
    from headrace.kernels.norm_rope_write_triton import MANY_TOKENS, tile_tokens

    rotated_at_once = tile_tokens(MANY_TOKENS, HEAD_DIM)
    front = normed(product, rows, named["x"])
    read = reader(product, rows, tile=rotated_at_once)
    return lambda it: (front(), read(invariant_product(weight=it, **named, settings=tile)))


def timed(call: Callable[[Tensor], object], weights: list[Tensor], rows: int) -> float:
    """Microseconds."""
    if rows >= LONG:
        return time_long_call(partial(call, weights[0]))
    return time_calls([partial(call, weight) for weight in weights])


def of_rows(named: dict[str, Any], rows: int) -> dict[str, Any]:
    residual = named["residual"]
    cut = {"x": named["x"][:rows], "residual": None if residual is None else residual[:rows]}
    return named | cut


def bench_rows(
    product: Product,
    rows: int,
    weights: list[Tensor],
    named: dict[str, Any],
    whole: Tensor,
    *,
    verbose: bool,
) -> tuple[bool, Settings]:
    """Prints a line; False if bits differ, and the best tile."""
    from headrace.kernels.invariant_product_triton import invariant_product

    cut = of_rows(named, rows)
    times: dict[Settings, float] = {}
    right, chosen = True, tiles(product, rows)[0]
    for tile in tiles(product, rows):
        try:
            out = invariant_product(weight=weights[0], **cut, settings=tile)
            if not torch.equal(out, whole[:rows]):
                print(f"WRONG BITS {product.name}, {rows} rows, {shown(tile)}")
                right = False
            times[tile] = timed(own_call(product, rows, cut, tile), weights, rows)
        except Exception as error:  # the other tiles are still worth their time
            print(f"FAILED {product.name}, {rows} rows, {shown(tile)}: {str(error)[:150]}")
            right = right and tile is not chosen
    default = timed(default_call(product, rows, weights[0]), weights, rows)
    best = min(times, key=lambda tile: times[tile])
    own = times.get(chosen, float("nan"))
    rate = 2 * rows * product.outputs * product.inputs / own / 1e6
    print(
        f"{product.name:13}{rows:6} {default:9.1f} {own:9.1f} {own / default:5.2f} {rate:6.0f}  "
        f"{shown(chosen):24} best {times[best]:9.1f} {times[best] / default:5.2f} {shown(best)}",
        flush=True,
    )
    if verbose:
        for tile in sorted(times, key=lambda tile: times[tile]):
            print(f"    {times[tile]:9.1f} {shown(tile)}")
    return right, best


def shown(tile: Settings) -> str:
    if isinstance(tile, FewRowsSettings):
        return f"left {(tile.weights, tile.block, tile.stages, tile.warps)}"
    shape = (tile.tokens, tile.weights, tile.block, tile.stages, tile.warps)
    return f"{shape}{' persistent' if tile.persistent else ''}"


def in_code(tile: Settings) -> str:
    """As in the table."""
    if isinstance(tile, FewRowsSettings):
        return f"_left({tile.weights}, {tile.block}, {tile.stages})"
    shape = f"{tile.tokens}, {tile.weights}, {tile.block}, {tile.stages}, {tile.warps}"
    prefetch = f", prefetch={tile.prefetch}" if tile.prefetch else ""
    return f"_tile({shape}{prefetch}{', persistent=True' if tile.persistent else ''})"


def bench_product(product: Product, *, verbose: bool) -> bool:
    """Prints a line for each number of rows; False if bits or a result are wrong."""
    from headrace.kernels.invariant_product_triton import invariant_product

    most = HEAD_ROWS if product.logits else MOST
    weights = rotated(draw(product.outputs, product.inputs) * product.inputs**-0.5)
    outputs = product.outputs // (2 if product.activation else 1)
    named = named_arguments(product, most, outputs)
    whole = invariant_product(weight=weights[0], **named)
    meant = {name: of_rows(named, 64)[name] for name in ("x", "residual", "activation")}
    expected = twin.few_rows(weight=weights[0], **meant, dtype=torch.float32)
    right = check(product.name, whole[:64], expected)
    best: dict[int, Settings] = {}
    for rows in (rows for rows in ROWS if rows <= most):
        good, best[rows] = bench_rows(product, rows, weights, named, whole, verbose=verbose)
        right &= good
    print(f"    ({product.outputs}, {product.inputs}): {{")
    for rows, tile in best.items():
        print(f"        {LIMITS[rows]}: {in_code(tile)},")
    print("    },", flush=True)
    return right


def bench_attention() -> bool:
    """Prints a line for each case; False if a result is wrong."""
    right = True
    for case in ATTENTION:
        try:
            default = attention_backends.measure("triton", case)
            own = attention_backends.measure("triton", case, deterministic=True)
        except Exception as error:
            print(f"{case!s:24} FAILED {type(error).__name__}: {str(error)[:200]}")
            right = False
            continue
        rate = attention_backends.rate(case, own)
        print(f"{case!s:24} {default:9.1f} {own:9.1f} {own / default:5.2f}  {rate}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="deterministic")
    parser.add_argument("--only", default="8B", help="products whose name begins with this")
    parser.add_argument("--tiles", action="store_true", help="print the time of every tile")
    asked = parser.parse_args()
    products = [product for product in PRODUCTS if product.name.startswith(asked.only)]
    works = {
        Work(product=product, rows=rows if tile is None else COMPILED, tile=tile)
        for product in products
        for rows in ROWS
        for tile in (*tiles(product, rows), None)
    }
    in_processes(compile_one, [*ATTENTION, *sorted(works, key=str)])
    print(f"{torch.cuda.get_device_name()}, copy {copy_rate() / 1e12:.2f} TB/s; {DTYPE}")
    print(
        "microseconds of norm, product and reader; TFLOP/s; tile: tokens, weights, block, stages,"
    )
    print(f"warps\n{'product':13}{'rows':>6} {'default':>9} {'own':>9} ratio TFLOP/s")
    right = [bench_product(product, verbose=asked.tiles) for product in products]
    right.append(bench_attention())
    print("all bits equal" if all(right) else "WRONG")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
