"""For all tests."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """What collecting the tests has imported is set aside: engines come and go by the hundred, and
    looking through a million objects that stay, again and again, took a quarter of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
