"""Which path prepares what, and in which order."""

from typing import Any

from headrace.batch.facts import Bucket
from headrace.execution.captures_buckets import next_missing
from headrace.execution.selector import Selector

BUCKETS = [Bucket(tokens=size, sequences=size) for size in (1, 2, 4)]


class Paths:
    """A path with so many buckets to make ready."""

    def __init__(self, missing: int) -> None:
        self.missing = missing

    def prepare_more(self) -> bool:
        self.missing -= 1
        return self.missing >= 0


def test_the_largest_bucket_first_then_from_the_smallest() -> None:
    captured: list[Bucket] = []
    while bucket := next_missing(BUCKETS, captured):
        captured.append(bucket)
    assert captured == [BUCKETS[2], BUCKETS[0], BUCKETS[1]]
    assert next_missing([], captured) is None


def test_one_bucket_of_one_path_at_a_time() -> None:
    paths: list[Any] = [Paths(2), Paths(0), Paths(1)]
    selector = Selector(paths)
    left = []
    while selector.prepare_more():
        left.append([max(0, path.missing) for path in paths])
    assert left == [[1, 0, 1], [0, 0, 1], [0, 0, 0]]
