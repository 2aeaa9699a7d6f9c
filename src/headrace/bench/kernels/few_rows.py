"""`python -m headrace.bench.kernels.few_rows`: checks and times products of few rows on a GPU.

Each product with the kernel that reads it (rotation and KV write, norm, gate; none behind a head),
as a layer launches them: by cuBLAS, and by our kernel with the settings that a layer would choose.
Beside it the floor: bytes of weights over the measured copy rate. `--shapes 3072x2048` times
products alone, of weights [3072, 2048].
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.bench.kernels.products import (
    DTYPE,
    HEAD_DIM,
    PRODUCTS,
    Product,
    check,
    in_processes,
    rotated,
)
from headrace.bench.kernels.timing import copy_rate, time_calls
from headrace.kernels import few_rows as twin
from headrace.kernels.few_rows_settings import FewRowsSettings, few_rows_settings
from headrace.kernels.gated_activation import summed

ROWS = (2, 8, 16, 32, 64, 128)
NORM: dict[str, Any] = {"eps": 1e-6, "pdl": True}
COMPILED = 256  # rows of weights that compiling takes: a multiple of 16, as all measured are


def chosen(product: Product, rows: int) -> FewRowsSettings | None:
    return few_rows_settings(rows, product.outputs, product.inputs, torch.device("cuda"))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def arguments(
    product: Product, rows: int, outputs: int, settings: FewRowsSettings
) -> dict[str, Any]:
    """What our kernel takes beside the weights [outputs, inputs]."""
    gated = product.activation if settings.splits == 1 else None
    return {
        "x": draw(rows, product.inputs),
        "residual": draw(rows, outputs) if product.residual else None,
        "activation": gated,
        "dtype": torch.float32 if product.logits else None,
        "settings": settings,
        "pdl": True,
    }


def compile_one(work: tuple[Product, int]) -> None:
    """Runs what is chosen once on few weights."""
    from headrace.kernels.few_rows_triton import few_rows

    product, rows = work
    settings = chosen(product, rows)
    assert settings is not None
    few_rows(weight=draw(COMPILED, product.inputs), **arguments(product, rows, COMPILED, settings))
    torch.cuda.synchronize()


def library_call(product: Product, rows: int) -> Callable[[Tensor], Tensor]:
    """The product by cuBLAS, as `TritonOperators` asks it; takes the weights."""
    x = draw(rows, product.inputs)
    if product.residual:
        stream = draw(rows, product.outputs)
        return lambda weight: stream.addmm_(x, weight.t())
    if product.logits:
        return lambda weight: torch.mm(x, weight.t(), out_dtype=torch.float32)
    return partial(F.linear, x)


def reader(product: Product, rows: int, *, tile: int | None = None) -> Callable[[Tensor], object]:
    """The kernel behind the product; takes its result, which may be in parts or gated already.

    Args:
        tile: tokens of a program of the rotation, which else follow `rows`.
    """
    from headrace.kernels.gated_activation_triton import gated_activation
    from headrace.kernels.norm_rope_write_triton import norm_rope_write
    from headrace.kernels.norms_triton import rms_norm, sum_rms_norm

    if product.residual:
        weight = draw(product.outputs)
        return lambda out: (
            sum_rms_norm(out, weight, dtype=DTYPE, **NORM)
            if out.dim() == 3
            else rms_norm(out, weight, **NORM)
        )
    if product.activation:
        gate = partial(gated_activation, activation=product.activation, dtype=DTYPE, pdl=True)
        return lambda out: gate(out) if out.shape[-1] == product.outputs else out
    if product.heads:
        slots = torch.arange(rows, device="cuda") + 64
        keys, values = (draw(rows // 64 + 2, 64, product.heads[1], HEAD_DIM) for _ in range(2))
        norms = {"q_norm": draw(HEAD_DIM), "k_norm": draw(HEAD_DIM), **NORM}
        table = torch.randn(2048, HEAD_DIM, device="cuda")
        return lambda out: norm_rope_write(
            out, table, slots, keys, values, slots, dtype=DTYPE, tile=tile, **norms
        )
    return lambda out: out


def bench_rows(product: Product, rows: int, weights: list[Tensor]) -> tuple[str, bool]:
    """A cell of the table, cuBLAS, ours, ratio; and whether ours is right."""
    from headrace.kernels.few_rows_triton import few_rows

    read, multiply = reader(product, rows), library_call(product, rows)
    library = time_calls([partial(lambda it: read(multiply(it)), weight) for weight in weights])
    settings = chosen(product, rows)
    if settings is None:
        return f"{library:7.1f}      -     -", True
    named = arguments(product, rows, product.outputs, settings)
    ours = partial(few_rows, **named)
    meant = {name: named[name] for name in ("x", "residual", "activation")}
    expected = twin.few_rows(weight=weights[0], **meant, dtype=torch.float32)
    right = check(f"{product.name}, {rows} rows", summed(ours(weight=weights[0])), expected)
    time = time_calls([partial(lambda it: read(ours(weight=it)), weight) for weight in weights])
    return f"{library:7.1f}{time:7.1f}{library / time:6.2f}", right


def bench_product(product: Product, rate: float) -> bool:
    """Prints a line; False if a result is wrong."""
    weights = rotated(draw(product.outputs, product.inputs) * product.inputs**-0.5)
    cells = [bench_rows(product, rows, weights) for rows in ROWS]
    line = "".join(cell for cell, _ in cells)
    print(f"{product.name:17}{product.size / rate * 1e6:7.1f}{line}", flush=True)
    return all(right for _, right in cells)


def shape(text: str) -> Product:
    outputs, inputs = (int(part) for part in text.split("x"))
    return Product(name=text, outputs=outputs, inputs=inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="products whose name contains this")
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="NxK", help="products alone")
    asked = parser.parse_args()
    products = asked.shapes or [product for product in PRODUCTS if asked.only in product.name]
    works = [(product, rows) for product in products for rows in ROWS]
    in_processes(compile_one, [work for work in works if chosen(*work) is not None])
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; microseconds, bfloat16")
    print(f"{'product + reader':17}  floor" + "".join(f"{rows:7} rows   ratio" for rows in ROWS))
    right = [bench_product(product, rate) for product in products]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
