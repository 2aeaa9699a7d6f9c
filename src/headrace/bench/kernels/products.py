"""The products of a layer that the benchmarks time, and what these share."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.bench.kernels.timing import copies_of
from headrace.kernels.gated_activation import Activation

DTYPE = torch.bfloat16
HEAD_DIM = 128
TOLERANCE = 1e-2  # |out - twin| / |twin|; bfloat16 rounds to about 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of a layer and its neighbours: weights [outputs, inputs].

    norm: in front; residual, activation: behind; heads: of queries and of keys, which are rotated
    behind; logits: the result is float32.
    """

    name: str
    outputs: int
    inputs: int
    norm: bool = False
    residual: bool = False
    activation: Activation | None = None
    heads: tuple[int, int] | None = None
    logits: bool = False

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return self.outputs * self.inputs * DTYPE.itemsize


def _model(
    name: str, hidden: int, inner: int, heads: tuple[int, int], vocabulary: int
) -> list[Product]:
    queries, keys = heads
    qkv = (queries + 2 * keys) * HEAD_DIM
    return [
        Product(name=f"{name} qkv", outputs=qkv, inputs=hidden, norm=True, heads=heads),
        Product(name=f"{name} o", outputs=hidden, inputs=queries * HEAD_DIM, residual=True),
        Product(
            name=f"{name} gate up", outputs=2 * inner, inputs=hidden, norm=True, activation="silu"
        ),
        Product(name=f"{name} down", outputs=hidden, inputs=inner, residual=True),
        Product(name=f"{name} head", outputs=vocabulary, inputs=hidden, norm=True, logits=True),
    ]


PRODUCTS = [
    *_model("8B", 4096, 12288, (32, 8), 151936),
    *_model("0.6B", 1024, 3072, (16, 8), 151936),
    *_model("Llama 8B", 4096, 14336, (32, 8), 128256)[2:],  # qkv and o are those of 8B
]


def rotated(weight: Tensor) -> list[Tensor]:
    """The weights and as many copies as it takes that none is in the cache when its turn comes."""
    copies = copies_of(weight.numel() * weight.element_size())
    return [weight, *(weight.clone() for _ in range(copies - 1))]


def in_processes(compile_one: Callable[[Any], None], works: Iterable[Any]) -> None:
    """Each work in one of many processes: what it compiles stays in the kernel cache on disk."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        list(pool.map(compile_one, works, chunksize=4))


def check(name: str, out: Tensor, expected: Tensor) -> bool:
    """Prints a line and gives False if `out` is wrong."""
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    if not error < TOLERANCE:
        print(f"WRONG {name}: relative error {error:.2e}")
    return error < TOLERANCE
