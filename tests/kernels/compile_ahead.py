"""Kernels compiled ahead for a GPU that is not there; prints what happened as JSON.

Run in a process of its own: Triton must not be interpreting.
"""

import json
import threading
from collections.abc import Callable
from typing import Any

import faked_gpu
import torch
import triton
import triton.language as tl

GPU = faked_gpu.install()

from headrace.kernels.compile_ahead_triton import (  # noqa: E402
    compile_ahead,
    watched_compilations,
)
from headrace.kernels.few_rows_settings import FewRowsSettings  # noqa: E402
from headrace.kernels.few_rows_triton import few_rows  # noqa: E402
from headrace.kernels.kept_launches_triton import KeptLaunches  # noqa: E402
from headrace.kernels.norms_triton import rms_norm  # noqa: E402

DEVICE = torch.device("cpu")
SETTINGS = FewRowsSettings(weights=64, block=64, warps=4, stages=2)


def norm(x: torch.Tensor) -> None:
    rms_norm(x, x.new_zeros(x.shape[1]), eps=1e-6, pdl=True)


def launches() -> None:
    """Three variants: a norm of aligned rows, one of rows that are not, and a product by TMA."""
    x, weight = (torch.zeros(rows, 256, dtype=torch.bfloat16) for rows in (16, 64))
    for _ in range(3):
        norm(x)
    norm(torch.zeros(16, 257, dtype=torch.bfloat16)[:, 1:])
    few_rows(x, weight, settings=SETTINGS, pdl=True)


@triton.jit
def _hopeless_kernel(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0, "no size will do")


def hopeless() -> None:
    norm(torch.zeros(16, 128, dtype=torch.float16))
    _hopeless_kernel[(1,)](torch.zeros(4), SIZE=4)


@triton.jit
def _fill_kernel(x, value, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), value)


def kept_launches() -> list[int]:
    """Kernels compiled, and launches, of one that is launched, then dry, then again."""
    GPU.launched.clear()
    launch = KeptLaunches(_fill_kernel, {"SIZE": 16})

    def fill() -> None:
        launch("any", (1, 1, 1), torch.zeros(16), 2.0)

    fill()
    told = [len(GPU.launched)]
    told += [compile_ahead(fill, DEVICE).count, len(GPU.launched)]
    fill()
    return [*told, len(GPU.launched)]


def aside(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def forget() -> None:
    """As a new process would, that finds the cache on disk."""
    for module in (rms_norm, few_rows):
        for value in vars(__import__(module.__module__, fromlist=["x"])).values():
            if isinstance(value, triton.runtime.JITFunction):
                value.device_caches.clear()


def main() -> None:
    told: dict[str, Any] = {}
    cold = compile_ahead(launches, DEVICE)
    told["cold"] = [sorted(cold.compiled), list(cold.found), list(GPU.launched), len(GPU.loaded)]
    with watched_compilations() as asked:
        launches()
    told["afterwards"] = [asked, len(GPU.launched), len(GPU.loaded)]
    again = compile_ahead(launches, DEVICE)
    told["again"] = [again.count, len(GPU.launched)]
    told["kept launches"] = kept_launches()
    GPU.launched.clear()
    told["another thread"] = [compile_ahead(lambda: aside(launches), DEVICE).count]
    told["another thread"].append(len(GPU.launched))
    forget()
    warm = compile_ahead(launches, DEVICE)
    told["warm"] = [list(warm.compiled), sorted(warm.found), len(GPU.launched)]
    told["failing"] = raised(lambda: compile_ahead(hopeless, DEVICE))
    with watched_compilations() as asked:
        norm(torch.zeros(16, 128, dtype=torch.float16))
    told["kept"] = asked
    told["broken off"] = raised(lambda: compile_ahead(lambda: 1 / 0, DEVICE))
    told["nested"] = raised(
        lambda: compile_ahead(lambda: print(compile_ahead(launches, DEVICE)), DEVICE)
    )
    before = len(GPU.launched)
    launches()
    told["restored"] = [triton.knobs.compilation.listener, len(GPU.launched) - before]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
