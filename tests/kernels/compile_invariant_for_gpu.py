"""Compiles the batch-invariant kernels for a named GPU, without having one.

Run in a process of its own: Triton must not be interpreting. Prints one line per kernel, as JSON:
name, shared memory in bytes, whether its code waits for the kernel in front, the shapes of its
instructions on tensor cores, and the layouts that rows are summed in.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from compile_for_gpu import Recorder, waits_first

from headrace.kernels import invariant_attention_triton, invariant_product_triton
from headrace.kernels.invariant_product_settings import ProductSettings


class Launches:
    """`KeptLaunches` that launch through the recorder."""

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: Any) -> None:
        self.kernel, self.named = kernel, {**constants, **options}

    def __call__(self, key: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        self.kernel[grid](*arguments, **self.named)


def recorders() -> dict[str, Recorder]:
    """Replaces the kernels; the argument checks would refuse tensors of the CPU."""
    invariant_attention_triton.check_layer = lambda *arguments, **named: None
    invariant_attention_triton.KeptLaunches = Launches
    invariant_product_triton.check_fused = lambda *arguments, **named: None
    invariant_product_triton.multiprocessors = lambda device: 132
    found = {}
    for module in (invariant_attention_triton, invariant_product_triton):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                found[name] = Recorder(kernel)
                setattr(module, name, found[name])
    return found


def products(kind: torch.dtype, pdl: bool) -> Iterator[str]:
    """Launches each form and names the kernel."""
    product, x = invariant_product_triton.invariant_product, torch.empty(200, 4096, dtype=kind)
    weight = torch.empty(4096, 4096, dtype=kind)
    if kind is torch.float32:
        product(x, weight, residual=x, pdl=pdl)
        yield "_product_kernel"
        return
    few = ProductSettings(tokens=64, weights=16, block=128, warps=4, stages=9, prefetch=128)
    wide = ProductSettings(tokens=128, weights=256, block=64, warps=8, stages=4)
    all_of_them = ProductSettings(
        tokens=128, weights=256, block=64, warps=8, stages=3, persistent=True
    )
    for tile, traits in (
        (few, {"residual": x}),
        (wide, {"activation": "silu"}),
        (all_of_them, {"residual": x}),
    ):
        product(x, weight, settings=tile, pdl=pdl, **traits)
        yield "_product_kernel"
    short = torch.empty(200, 64, dtype=kind)
    tile = ProductSettings(tokens=64, weights=32, block=64, warps=4, stages=3)
    product(short, torch.empty(64, 64, dtype=kind), residual=short, settings=tile, pdl=pdl)
    yield "_product_kernel"


def attention(kind: torch.dtype, pdl: bool) -> Iterator[str]:
    q, cache = torch.empty(4, 32, 128, dtype=kind), torch.empty(100, 64, 8, 128, dtype=kind)
    table, lengths = torch.empty(4, 100, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    layer = invariant_attention_triton.InvariantAttention(q, cache, cache, scale=0.1, pdl=pdl)
    out = torch.empty_like(q)
    layer.decode(q, table, lengths, out=out, runs=1, tables_ready=pdl)
    yield "attend_kernel"
    layer.decode(q, table, lengths, out=out, runs=4, tables_ready=pdl)
    yield "attend_kernel"
    yield "combine_kernel"
    layer.extend(q, table, lengths, lengths, lengths, max_extend=100, out=out, covered=4)
    yield "attend_kernel"


def sums_of_rows(code: str) -> list[str]:
    """The layouts of all reductions."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, flags=re.M))
    shapes = re.findall(r'"tt\.reduce"\(.*?\}\) : \(tensor<([^>]*)>', code, flags=re.S)
    return sorted({layouts.get(shape.split(", ")[-1], shape) for shape in shapes})


def main(capability: int, *dtypes: str) -> None:
    kernels = recorders()
    pdl = capability >= 90
    for dtype in dtypes:
        for forms in (products, attention):
            for name in forms(getattr(torch, dtype), pdl):
                compiled = kernels[name].compile(capability)
                code = compiled.asm["ptx"]
                report = {
                    "name": name,
                    "shared": compiled.metadata.shared,
                    "waits": waits_first(compiled),
                    "warp groups": sorted(set(re.findall(r"wgmma\.\S*?(m\d+n\d+k\d+)", code))),
                    "warps": sorted(set(re.findall(r"[^g]mma\.sync\.\S*?(m\d+n\d+k\d+)", code))),
                    "sums": sums_of_rows(compiled.asm["ttgir"]),
                    "loops": compiled.asm["ttir"].count("scf.for"),
                }
                print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
