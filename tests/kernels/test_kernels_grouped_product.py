"""Products of rows with the matrix of their group: the twin, and the kernel in the interpreter."""

import pytest
import torch
from fused_cases import assert_close, strided
from grouped_cases import CASES, Grouped

from headrace.kernels.grouped_product import grouped_product

pytest.importorskip("triton", reason="the kernels need the triton package")
kernels = pytest.importorskip("headrace.kernels.grouped_product_triton")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_is_one_product_a_group(case: Grouped, dtype: torch.dtype) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch's product on a GPU is not used")
    x, weight, ends = case.arguments(dtype)
    out = grouped_product(x, weight, ends)
    assert out.dtype is dtype
    assert_close(out, case.expected(x, weight), dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_is_the_twin(case: Grouped, dtype: torch.dtype) -> None:
    x, weight, ends = case.arguments(dtype)
    assert_close(kernels.grouped_product(strided(x), weight, ends), case.expected(x, weight), dtype)


def test_a_row_of_nan_stays_alone() -> None:
    case = CASES[0]
    x, weight, ends = case.arguments(torch.float32)
    x[5] = torch.nan
    out = kernels.grouped_product(x, weight, ends)
    others = [row for row in range(21) if row != 5]
    assert out[5].isnan().all()
    assert_close(out[others], case.expected(x, weight)[others], torch.float32)
