"""The grouped product on a CUDA device, eagerly and captured: the routing may change at replay."""

import pytest
import torch
from fused_cases import assert_close, strided
from grouped_cases import CASES, Grouped

pytestmark = pytest.mark.gpu

pytest.importorskip("triton", reason="the kernels need the triton package")
kernels = pytest.importorskip("headrace.kernels.grouped_product_triton")

REAL = Grouped(counts=(0, 9, 300, *[3] * 100, *[0] * 25), outputs=1536, inputs=2048)


@pytest.fixture(autouse=True)
def _cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("case", [*CASES, REAL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_agrees_with_one_product_a_group(case, dtype):
    x, weight, ends = case.arguments(dtype)
    assert_close(kernels.grouped_product(strided(x), weight, ends), case.expected(x, weight), dtype)


def test_a_capture_holds_for_every_routing():
    first = Grouped(counts=(4, 0, 8, 4), outputs=96, inputs=64)
    x, weight, ends = first.arguments(torch.bfloat16)
    kernels.grouped_product(x, weight, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.grouped_product(x, weight, ends)
    for counts in ((16, 0, 0, 0), (0, 5, 5, 6), (1, 1, 1, 13)):
        other = Grouped(counts=counts, outputs=96, inputs=64)
        ends.copy_(other.arguments(torch.bfloat16)[2])
        graph.replay()
        assert_close(out, other.expected(x, weight), torch.bfloat16)
