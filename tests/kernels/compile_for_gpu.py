"""Compiles the attention kernels for a named GPU, without having one.

Run in a process of its own: Triton must not be interpreting. The host functions are called with
their launches recorded, so that the arguments compiled for are the ones that would be launched.
Prints one line per kernel: name, shared memory in bytes, and whether its code waits for the kernel
in front (`waits_first`).
"""

import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels import decode_attention_triton, extend_attention_triton

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}

SHARED = {90: 227 * 1024, 89: 99 * 1024}  # bytes a block may have

# What is read before the wait are weights there, or tables that the caller promises to be complete.
READ_EARLY = ("_matvec_kernel", "_norm_kernel", "decode_kernel", "attend_kernel", "combine_kernel")

OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")


class Recorder:
    """Stands in for a kernel and keeps what it would have been launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names
        self.launch: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            self.launch = arguments, named

        return launch

    def compile(self, capability: int) -> Any:
        arguments, named = self.launch
        options = {key: named.pop(key) for key in OPTIONS if key in named}
        bound = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(self.kernel.arg_names):
            value, parameter = bound[name], self.kernel.params[index]
            if parameter.is_constexpr or value is None:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                kind = TYPES[value.base.dtype].removeprefix("*")
                signature[name] = f"tensordesc<{kind}{list(value.block_shape)}>"
            elif isinstance(value, int):
                signature[name] = "i32"
                if not parameter.do_not_specialize and value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32"
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def recorders() -> dict[str, Recorder]:
    """Replaces the kernels of both modules; the argument check would refuse tensors of the CPU."""
    found = {}
    for module in (decode_attention_triton, extend_attention_triton):
        module.check_layer = lambda *arguments, **named: None
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                found[name] = Recorder(kernel)
                setattr(module, name, found[name])
    return found


def main(capability: int, *shapes: str) -> None:
    """Each shape is heads,kv_heads,dim,value_dim,page,dtype,plain|all."""
    kernels = recorders()
    extend_attention_triton.shared_memory = lambda device: SHARED[capability]
    takes, takes_none = extend_attention_triton.takes_blocks, lambda cache, block: False
    for shape in shapes:
        *numbers, dtype, traits = shape.split(",")
        heads, kv_heads, dim, value_dim, page = map(int, numbers)
        kind = getattr(torch, dtype)
        q = torch.empty(8, heads, dim, dtype=kind)
        caches = (torch.empty(4, page, kv_heads, size, dtype=kind) for size in (dim, value_dim))
        table, lens = (torch.zeros(size, dtype=torch.int32) for size in ((8, 3), (8,)))
        options: dict[str, Any] = {"scale": 0.1}
        if traits == "all":
            options |= {
                "window": 100,
                "soft_cap": 30.0,
                "sinks": torch.zeros(heads),
                "lse": torch.empty(8, heads),
            }
        arguments = (q, *caches, table)
        for by_block in (True, False):  # where descriptors take the pool
            extend_attention_triton.takes_blocks = takes if by_block else takes_none
            extend_attention_triton.paged_extend(
                *arguments,
                lens,
                lens,
                lens,
                max_extend=8,
                covered=8 if by_block else None,
                pdl=capability >= 90,
                **options,
            )
            if by_block:
                report("extend_kernel by block", kernels["extend_kernel"], capability)
        for splits in (1, 4):
            decode_attention_triton.paged_decode(
                *arguments,
                lens,
                splits=splits,
                pdl=capability >= 90,
                tables_ready=splits > 1,
                **options,
            )
            if splits == 1:
                report("decode_kernel whole", kernels["decode_kernel"], capability)
        for name, kernel in kernels.items():
            report(name, kernel, capability)


def waits_first(compiled: Any) -> bool:
    """Whether programs wait for the kernels in front before they write, and before they read, but
    for `READ_EARLY`. To ask for lines to come to the L2 is no reading."""
    before, wait, _ = compiled.asm["ptx"].partition("griddepcontrol.wait")
    kinds = r"\b(st|atom|red)\.global"
    if compiled.metadata.name not in READ_EARLY:
        kinds += r"|\bld\.global|\bcp\.async"
    return bool(wait) and re.search(kinds, before) is None


def report(name: str, kernel: Recorder, capability: int) -> None:
    compiled = kernel.compile(capability)
    assert "cubin" in compiled.asm
    print(name, compiled.metadata.shared, waits_first(compiled))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
