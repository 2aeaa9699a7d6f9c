"""Compiles the fused kernels for a named GPU, without having one.

Run in a process of its own: Triton must not be interpreting. Prints one line per kernel: name,
shared memory in bytes, and whether its code waits for the kernel in front.
"""

import sys
from typing import Any

import torch
from compile_for_gpu import Recorder, waits_first

from headrace.kernels import (
    few_rows_triton,
    gated_activation_triton,
    grouped_product_triton,
    matvec_triton,
    norm_rope_write_triton,
    norms_triton,
)
from headrace.kernels.few_rows_settings import FewRowsSettings
from headrace.kernels.matvec_settings import MatvecSettings

MODULES = (
    few_rows_triton,
    gated_activation_triton,
    grouped_product_triton,
    matvec_triton,
    norm_rope_write_triton,
    norms_triton,
)


def recorders() -> dict[str, Recorder]:
    """Replaces the kernels; the argument check would refuse tensors of the CPU."""
    found = {}
    for module in MODULES:
        module.check_fused = lambda *arguments, **named: None
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                found[name] = Recorder(kernel)
                setattr(module, name, found[name])
    return found


def launches(kind: torch.dtype, pdl: bool) -> Any:
    """Calls each host function and names the kernel that it launches."""
    x, weight = torch.empty(1, 4096, dtype=kind), torch.empty(2048, 4096, dtype=kind)
    norm, few = torch.empty(4096, dtype=kind), torch.empty(8, 4096, dtype=kind)
    options = {"norm_weight": norm, "eps": 1e-6, "pdl": pdl}
    matvec = matvec_triton.matvec
    yield "_matvec_kernel", matvec(x, weight, **options, residual=x[:, :2048])
    early = MatvecSettings(rows=4, block=1024, warps=8, prefetch=True)
    yield "_matvec_kernel", matvec(x, weight, **options, activation="silu", settings=early)
    logits = torch.empty(1, 2048)
    yield "_matvec_kernel", matvec(x, weight, **options, bias=norm[:2048], out=logits)
    yield "_norm_kernel", norms_triton.rms_norm(few.view(8, 32, 128), norm[:128], eps=0.0, pdl=pdl)
    parts, sums = torch.empty(4, 8, 48 * 128), {"dtype": kind, "pdl": pdl}
    stream = parts[..., :4096].contiguous()
    yield "_norm_kernel", norms_triton.sum_rms_norm(stream, norm, eps=0.0, **sums)
    yield "_gate_kernel", gated_activation_triton.gated_activation(parts, **sums)
    yield "_gate_kernel", gated_activation_triton.gated_activation(few, pdl=pdl)
    stacked, ends = torch.empty(128, 1536, 2048, dtype=kind), torch.zeros(128, dtype=torch.int32)
    for tokens in (8, 4096):  # tiles of few rows, and of many
        x = torch.empty(tokens, 2048, dtype=kind)
        yield "_grouped_kernel", grouped_product_triton.grouped_product(x, stacked, ends)
    if kind is not torch.float32:
        few_rows = few_rows_triton.few_rows
        shape = {"weights": 128, "block": 64, "warps": 4, "stages": 5}
        for descriptor in (True, False) if pdl else (False,):
            settings = FewRowsSettings(**shape, descriptor=descriptor, prefetch=256)
            gated = {"settings": settings, "activation": "silu", "pdl": pdl}
            yield "_few_rows_kernel", few_rows(few, weight, **gated)
            split = FewRowsSettings(**shape, descriptor=descriptor, splits=4)
            addends = {"residual": few[:, :2048], "bias": norm[:2048], "pdl": pdl}
            yield "_few_rows_kernel", few_rows(few, weight, settings=split, **addends)
    cache, table = torch.empty(4, 64, 8, 128, dtype=kind), torch.empty(100, 128)
    for tokens in (8, 1024):  # one token a program, and several
        index = torch.zeros(tokens, dtype=torch.int64)
        qkv = torch.empty(tokens, 48 * 128, dtype=kind)
        arguments = (qkv, table, index, cache, cache, index)
        norms = {"q_norm": norm[:128], "k_norm": norm[:128], "pdl": pdl}
        yield "_rope_kernel", norm_rope_write_triton.norm_rope_write(*arguments, **norms)


def main(capability: int, *dtypes: str) -> None:
    kernels = recorders()
    pdl = capability >= 90
    for dtype in dtypes:
        for name, _ in launches(getattr(torch, dtype), pdl):
            compiled = kernels[name].compile(capability)
            assert "cubin" in compiled.asm
            print(name, compiled.metadata.shared, waits_first(compiled))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
