"""A shorter form of `load.py`, which is run by hand for the figures."""

import pytest
from load import run

pytestmark = pytest.mark.slow


def test_nothing_is_lost_doubled_or_held_under_load() -> None:
    found = run(streams=100, seconds=20)
    assert found.faults(most_health=1.0) == []
    for what in ("done", "left", "aborted", "refused"):
        assert found.counts[what] > 0, found.counts
