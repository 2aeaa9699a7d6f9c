"""Operators and products whose rows have the same bits whatever is beside them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels.row_blocks import BLOCK_ROWS, telling_factors
from headrace.layers.deterministic_operators import ACTIVATIONS, DeterministicCpuOperators
from headrace.layers.mlp import ACTIVATIONS as PLAIN
from headrace.layers.row_blocks import RowBlockFormat
from headrace.layers.weight_formats import DENSE, WEIGHT_FORMATS, DenseFormat

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def same_anywhere(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Parts of x [n, ...], of many lengths and from many places, give what the whole gives."""
    whole = function(x)
    lengths = (*range(1, 40), 64, 100, 999)
    for length in (each for each in lengths if each <= len(x)):
        for start in (0, 1, 5, len(x) - length):
            if start <= len(x) - length:
                part = function(x[start : start + length].clone())
                assert torch.equal(part, whole[start : start + length]), (length, start)


@pytest.mark.parametrize("name", PLAIN)
def test_activations_do_not_depend_on_a_numbers_place(name: str) -> None:
    x = numbers(70_001)
    same_anywhere(ACTIVATIONS[name], x)
    torch.testing.assert_close(ACTIVATIONS[name](x), PLAIN[name](x), rtol=2e-6, atol=5e-6)
    far = torch.tensor([-200.0, 200.0, 0.0])
    torch.testing.assert_close(ACTIVATIONS[name](far), PLAIN[name](far))


@pytest.mark.parametrize("size", [8, 16, 50, 64, 576, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_row_is_that_of_the_row_alone(size: int, dtype: torch.dtype) -> None:
    norm: Any = SimpleNamespace(weight=numbers(size, seed=1).to(dtype), eps=1e-5, shape=(size,))
    operators = DeterministicCpuOperators()
    rows = numbers(120, size).to(dtype)
    same_anywhere(lambda x: operators.norm(norm, x), rows)
    wide = F.rms_norm(rows.double(), (size,), norm.weight.double(), 1e-5).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(operators.norm(norm, rows), wide, rtol=tolerance, atol=tolerance)
    heads = rows.view(30, 4, size)[:, 1:3]  # strided, as q beside k
    assert torch.equal(operators.norm(norm, heads)[7, 1], operators.norm(norm, rows[30:31])[0])


@pytest.mark.parametrize("form", ["onednn", "dense"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [48, 1536])
def test_a_product_of_any_rows_is_that_of_each_alone(
    form: str, dtype: torch.dtype, inputs: int
) -> None:
    blocks = RowBlockFormat(WEIGHT_FORMATS[form], dtype)
    weight = blocks.finish(numbers(80, inputs, seed=3).to(dtype))
    bias, x = numbers(80, seed=4).to(dtype), numbers(150, inputs).to(dtype)
    addend = numbers(150, 80, seed=5).to(dtype)
    whole = blocks.apply(x, weight, bias, addend)
    for count in (1, 2, 3, 7, 16, 33, 65, 130):
        for start in (0, 11):
            at = slice(start, start + count)
            assert torch.equal(blocks.apply(x[at], weight, bias, addend[at]), whole[at])
    exact = x.double() @ numbers(80, inputs, seed=3).to(dtype).double().t() + bias + addend
    torch.testing.assert_close(whole.double(), exact, rtol=2e-2, atol=1e-3 * inputs)
    assert blocks.apply(x[:0], weight, bias).shape == (0, 80)
    decision = blocks.decision
    assert set(decision.value) <= set(BLOCK_ROWS)
    assert decision.value
    assert f"{torch.get_num_threads()} threads" in decision.reason


@pytest.mark.parametrize("form", ["onednn", "dense"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (96, 64), (40, 33)])
def test_sums_that_nearly_cancel_are_the_same_in_any_rows(
    form: str, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    draw = torch.Generator().manual_seed(7)
    x, weight = telling_factors(70, outputs, inputs, dtype, draw)
    blocks = RowBlockFormat(WEIGHT_FORMATS[form], dtype)
    finished = blocks.finish(weight)
    whole = blocks.apply(x, finished, None)
    for count in (1, 2, 3, 7, 16, 33, 65):
        assert torch.equal(blocks.apply(x[-count:], finished, None), whole[-count:]), count


def test_a_library_whose_products_follow_the_place_is_refused() -> None:
    class Drifting(DenseFormat):
        def apply(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
            return DENSE.apply(x, *given, **named) + torch.rand(1)  # never the same twice

    with pytest.raises(UnsupportedError, match="depend on a row's place") as caught:
        RowBlockFormat(Drifting(), torch.float32).finish(numbers(8, 8))
    assert "OMP_NUM_THREADS" in caught.value.remedy
