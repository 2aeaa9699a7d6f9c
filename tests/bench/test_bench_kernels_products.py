"""What the benchmarks of kernels time, and how they judge a result."""

import pytest
import torch

from headrace.bench.kernels.few_rows import shape
from headrace.bench.kernels.products import PRODUCTS, Product, check
from headrace.kernels import few_rows_settings, matvec_settings


def test_every_measured_shape_is_timed() -> None:
    timed = {(product.outputs, product.inputs) for product in PRODUCTS}
    assert set(few_rows_settings.MEASURED) | set(matvec_settings.MEASURED) <= timed


def test_bytes_are_those_of_the_weights() -> None:
    assert {it.name: it.size for it in PRODUCTS}["8B down"] == 4096 * 12288 * 2


def test_other_shapes_are_products_alone() -> None:
    alone = shape("3072x2048")
    assert alone == Product(name="3072x2048", outputs=3072, inputs=2048)


@pytest.mark.parametrize(("error", "right"), [(3e-3, True), (3e-2, False), (torch.nan, False)])
def test_a_wrong_result_is_named(error: float, right: bool, capsys: pytest.CaptureFixture) -> None:
    expected = torch.ones(4, 4)
    assert check("8B o", expected + error, expected) is right
    assert ("WRONG 8B o" in capsys.readouterr().out) is not right
