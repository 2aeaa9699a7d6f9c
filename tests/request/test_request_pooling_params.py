"""Options of embeddings say what is wrong with them."""

import numpy as np
import pytest

from headrace import PoolingParams
from headrace.base.errors import RequestError


def test_defaults() -> None:
    assert PoolingParams() == PoolingParams(pooling=None, normalize=True, dimensions=None)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("pooling", "cls", "last or mean"),
        ("pooling", ["mean"], "last or mean"),
        ("normalize", 1, "True or False"),
        ("normalize", None, "True or False"),
        ("dimensions", 0, "integers in"),
        ("dimensions", -1, "integers in"),
        ("dimensions", True, "integers in"),
        ("dimensions", 2.0, "integers in"),
        ("dimensions", 2**31, "integers in"),
    ],
)
def test_bad_values_are_named(field: str, value: object, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        PoolingParams(**{field: value})
    assert caught.value.what.startswith(f"{field} is ")
    assert allowed in caught.value.remedy


def test_integers_of_other_libraries_count() -> None:
    dimensions = PoolingParams(dimensions=np.int32(7)).dimensions
    assert (type(dimensions), dimensions) == (int, 7)


def test_no_more_dimensions_than_the_model_has() -> None:
    PoolingParams(dimensions=64).check_size(64)
    PoolingParams().check_size(64)
    with pytest.raises(RequestError, match=r"dimensions is 65.*\[1, 64\]"):
        PoolingParams(dimensions=65).check_size(64)
