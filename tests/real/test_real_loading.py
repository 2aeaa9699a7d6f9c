"""Loading a real model stays fast."""

import time

import pytest
import torch
from real_reference import model_file

from headrace import LLM

pytestmark = pytest.mark.real

CPU_SECONDS = 15.0
"""0.7 to 1.0 on one thread of a 2-core machine, 5 where Python compiles the modules of a new
installation meanwhile; this thread's time: others may use the clock, and threads that earlier tests
left may use the processor. Unpacking weights value by value in Python takes minutes."""


def test_smollm2_loads_fast() -> None:
    model_file("smollm2")  # skips without the package
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting threads spin, which counts as processor time
    try:
        start = time.thread_time()
        with LLM("smollm2", device="cpu", dtype="float32", max_model_len=512):
            seconds = time.thread_time() - start
    finally:
        torch.set_num_threads(threads)
    assert seconds < CPU_SECONDS, f"{seconds:.2f} s"
