"""Attention of one layer by kept launches, beside launches for which Triton is asked each time.

Run in a process of its own, since Triton must not be interpreting; the compiler is faked. Prints as
JSON how many calls there were, how many of them Triton was asked, how many kernels they took, and
the calls that took another kernel than Triton would.
"""

import json
import random
from types import SimpleNamespace
from typing import Any

import faked_gpu
import torch
import triton

faked_gpu.install()
TAKEN: list[int] = []  # kernels that were launched, by a number


class Kernel(SimpleNamespace):
    """A compiled kernel that notes its launches."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: TAKEN.append(id(self))


def compile_nothing(src: Any, **_: Any) -> Any:
    kernel = Kernel(src=src, launch_metadata=lambda *_: None, function=None, packed_metadata=None)
    kernel.run = lambda *_: TAKEN.append(id(kernel))
    return kernel


triton.compiler.compile = compile_nothing

from headrace.kernels import decode_attention_triton as decode_kernels  # noqa: E402
from headrace.kernels import extend_attention_triton as extend_kernels  # noqa: E402
from headrace.kernels.decode_attention_settings import DEEP, SHALLOW  # noqa: E402
from headrace.kernels.decode_splits import DecodeScratch  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 64
decode_kernels.multiprocessors = lambda device: faked_gpu.MULTIPROCESSORS
extend_kernels.shared_memory = lambda device: faked_gpu.SHARED


def places(*shape: int, dtype: torch.dtype, shift: int) -> torch.Tensor:
    """A tensor whose first number lies `shift` numbers behind a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + shift, dtype=dtype)[shift:].view(shape)


def integers(count: int, shift: int) -> torch.Tensor:
    return places(count, dtype=torch.int32, shift=shift)


def a_step(draw: random.Random) -> dict[str, Any]:
    """Arguments that both kinds of attention take."""
    rows, shift = draw.choice((1, 3, 16)), lambda: draw.choice((0, 0, 1))
    kind, fused = torch.bfloat16, draw.choice((0, 1, 16))  # q may lie in a wider matrix
    width = (HEADS + fused) * DIM + draw.choice((0, 0, 1))
    q = places(rows, width, dtype=kind, shift=shift())[:, : HEADS * DIM]
    return {
        "q": q.unflatten(1, (HEADS, DIM)),
        "page_table": integers(rows * 5, shift()).view(rows, 5)[:, : draw.choice((1, 4, 5))],
        "lens": integers(rows, shift()),
        "out": places(rows, HEADS, DIM, dtype=kind, shift=shift()),
        "lse": draw.choice((None, places(rows, HEADS, dtype=torch.float32, shift=shift()))),
    }


def extend_calls(step: dict[str, Any], draw: random.Random) -> tuple[tuple[Any, ...], Any]:
    lens = [step["lens"]] * 3
    named = {"max_extend": draw.choice((1, 16, 300)), "covered": draw.choice((None, 1, 16))}
    return (step["page_table"], *lens), named


def decode_calls(step: dict[str, Any], draw: random.Random) -> tuple[tuple[Any, ...], Any]:
    rows, splits = step["q"].shape[0], draw.choice((1, 4, 16))
    sizes = {"batch": rows, "heads": HEADS, "splits": splits, "value_dim": DIM}
    named = {
        "splits": splits,
        "scratch": DecodeScratch.allocate(**sizes, device=torch.device("cpu")),
        "share": draw.choice((None, integers(1, draw.choice((0, 1))))),
        "settings": draw.choice((None, DEEP, SHALLOW)),
        "tables_ready": draw.choice((False, True)),
    }
    return (step["page_table"], step["lens"]), named


def compare(layer: Any, function: Any, calls: Any, caches: Any, habits: Any) -> dict[str, Any]:
    draw, wrong, kernels, asked = random.Random(0), [], set(), 0
    for number in range(200):
        step = a_step(draw)
        arguments, named = calls(step, draw)
        named |= {"out": step["out"], "lse": step["lse"]}
        before = sum(len(launch) for launch in kept(layer))
        TAKEN.clear()
        layer(step["q"], *arguments, **named)
        asked += sum(len(launch) for launch in kept(layer)) > before
        mine = list(TAKEN)
        TAKEN.clear()
        function(step["q"], *caches, *arguments, **named, **habits)
        kernels.update(mine)
        if mine != TAKEN or not mine:
            wrong.append(number)
    return {"calls": 200, "asked": asked, "kernels": len(kernels), "wrong": wrong}


def kept(layer: Any) -> list[dict[Any, Any]]:
    if isinstance(layer, extend_kernels.LayerExtend):
        return [layer._launch._kept]
    return [launch._kept for pair in layer._launches.values() for launch in pair]


def main() -> None:
    caches = [torch.zeros(4, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
    q = torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16)
    habits = {"scale": 0.125, "window": 100, "sinks": torch.zeros(HEADS), "pdl": True}
    extend, decode = (
        make(q, *caches, **habits)
        for make in (extend_kernels.LayerExtend, decode_kernels.LayerDecode)
    )
    told = {
        "extend": compare(extend, extend_kernels.paged_extend, extend_calls, caches, habits),
        "decode": compare(decode, decode_kernels.paged_decode, decode_calls, caches, habits),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
