"""Compiles kernels before they are needed, all at the same time.

Triton compiles a kernel at its first launch: some tenths of a second each, one kernel after another
and one core at work. Here a function that makes launches is called dry: every launch is left out,
and one whose kernel is not compiled yet is noted with all that Triton compiles it for (its
arguments are the real ones, so that their alignment counts). Then all that were noted are compiled,
and their launchers built, on a pool of threads: Triton's passes run without Python's lock, and
assembler and C compiler are processes of their own. The next launch of the kind finds its kernel.

The noting is Triton's own `AsyncCompileMode` with a twist: where it would hand out a kernel to wait
for, there is none, and a launch without a kernel returns. Kernels that an earlier engine of the
process compiled are left out too: they would read as places what others did not write.
"""

# mypy: disable-error-code="misc, no-untyped-call"

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton.runtime import JITFunction

from headrace.kernels.kept_launches_triton import launches_are_noted

Compile = Callable[[], Any]
Keep = Callable[[Any], None]

_ONE_AT_A_TIME = threading.RLock()  # engines may start in several threads; Triton is one


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernels:
    """What Triton was asked for: names of kernels, once for each variant.

    Attributes:
        compiled: by the compiler. found: in the cache on disk, where an earlier process left them.
    """

    compiled: tuple[str, ...]
    found: tuple[str, ...]
    seconds: float

    @property
    def count(self) -> int:
        return len(self.compiled) + len(self.found)

    def __str__(self) -> str:
        return (
            f"{len(self.compiled)} compiled, {len(self.found)} found in the cache, "
            f"in {self.seconds:.2f} s"
        )


def compile_ahead(
    launches: Callable[[], None], device: torch.device, *, progress: bool = False
) -> CompiledKernels:
    """Compile every kernel that `launches` launches.

    What kernels would have written is not there: `launches` must bear whatever lies in fresh
    memory, as far as something that is not Triton's reads it. It may compile nothing itself that
    waits for a kernel's result. Launches of other threads go on meanwhile.

    Under Triton's interpreter nothing is compiled, and `launches` is not called.

    Args:
        device: a CUDA device, whose kernels are compiled and loaded.
        progress: show a bar.

    Raises:
        what the compiler or the loader raises for the first kernel that fails; the others are kept.
    """
    if triton.knobs.runtime.interpret:
        return CompiledKernels(compiled=(), found=(), seconds=0.0)
    start = time.perf_counter()
    noted = _Noted()
    with _ONE_AT_A_TIME, watched_compilations() as asked, torch.cuda.device(device):
        with _launching_nothing(), noted:
            launches()
        _compile_all(noted.kernels, torch.cuda.current_device(), progress=progress)
    return CompiledKernels(
        compiled=tuple(name for name, found in asked if not found),
        found=tuple(name for name, found in asked if found),
        seconds=time.perf_counter() - start,
    )


@contextmanager
def watched_compilations() -> Iterator[list[tuple[str, bool]]]:
    """Notes every kernel that Triton is asked to compile meanwhile: name, found in its cache.

    One watch at a time, in all threads.
    """
    knobs, asked = triton.knobs.compilation, _Watch()
    before = knobs.listener
    assert not isinstance(before, _Watch), "kernels are compiled ahead one call at a time"
    knobs.listener = asked
    try:
        yield asked.kernels
    finally:
        knobs.listener = before


class _Watch:
    """Triton's listener."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, bool]] = []

    def __call__(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        self.kernels.append((src.name, cache_hit))


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Where launches are noted, kernels that are compiled are looked up and left out."""
    run = JITFunction.run

    def look_up(kernel: Any, *arguments: Any, warmup: bool, **named: Any) -> Any:
        return run(kernel, *arguments, warmup=warmup or launches_are_noted(), **named)

    JITFunction.run = look_up
    try:
        yield
    finally:
        JITFunction.run = run


class _Noted(triton.AsyncCompileMode):
    """Notes what would be compiled: how, and who keeps the result.

    Of a kernel's launches the first is noted. Triton leaves out a launch for which `submit` has
    no kernel.
    """

    def __init__(self) -> None:
        super().__init__(executor=None)
        self.kernels: dict[str, tuple[Compile, Keep]] = {}

    def submit(self, key: str, compile_fn: Compile, finalize_fn: Keep, *_: Any) -> None:
        self.kernels.setdefault(key, (compile_fn, finalize_fn))


def _compile_all(kernels: dict[str, tuple[Compile, Keep]], device: int, *, progress: bool) -> None:
    def work(compile_kernel: Compile) -> Any:
        kernel = compile_kernel()
        # Its launcher is C code in Triton 3.6: built here, and left in Triton's cache.
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    if not kernels:
        return
    with (
        ThreadPoolExecutor(
            _cores(), "compile", initializer=torch.cuda.set_device, initargs=(device,)
        ) as pool,
        tqdm(total=len(kernels), desc="Compiling kernels", disable=not progress) as bar,
    ):
        works = [pool.submit(work, compile_kernel) for compile_kernel, _ in kernels.values()]
        for _ in as_completed(works):
            bar.update()
    # Launchers are extension modules of one name. Python fills the module of that name anew when it
    # loads a file again, so two threads could take each other's: the ones to keep load one by one.
    for each, (_, keep) in zip(works, kernels.values(), strict=True):
        if each.exception() is None:
            kernel = each.result()
            kernel._init_handles()
            keep(kernel)
    for each in works:
        each.result()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
