"""For all tests."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    """What collecting the tests has imported is set aside: engines come and go by the hundred, and
    looking through a million objects that stay, again and again, took a quarter of the time."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
