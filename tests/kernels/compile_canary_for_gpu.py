"""Compiles the KV canary's kernels for a named GPU, without having one.

Run in a process of its own: Triton must not be interpreting. Prints one line per kernel: name, what
it looks at, loads of 16 bytes, and bytes of a thread's stack (none may spill).
"""

import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from canary_cases import make_pool, make_step
from compile_for_gpu import Recorder

from headrace.kernels import kv_canary_triton


def stack_bytes(cubin: bytes) -> int:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    return int(re.findall(r"STACK:(\d+)", told.stdout)[-1])


def main(capability: int) -> None:
    kernels = {name: Recorder(getattr(kv_canary_triton, name)) for name in NAMES}
    for name, recorder in kernels.items():
        setattr(kv_canary_triton, name, recorder)
    kv_canary_triton._check = lambda lengths: None
    for real_data in ("off", "partial", "all"):
        pool = make_pool(2, page_size=64, pages=5, real_data=real_data, heads=8, dims=(128, 128))
        for new in ([1, 1], [3, 1]):
            step = make_step(pool, new, random.Random(0))
            report = pool.report()
            kv_canary_triton.begin_step(step, pool.records, report)
            kv_canary_triton.end_step(step, pool.records, report)
            for name, recorder in kernels.items():
                compiled = recorder.compile(capability)
                wide = compiled.asm["ptx"].count("ld.global.v4")
                print(name, real_data, wide, stack_bytes(compiled.asm["cubin"]))


NAMES = ("_before_kernel", "_after_kernel")

if __name__ == "__main__":
    main(int(sys.argv[1]))
