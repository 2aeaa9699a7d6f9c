"""Counts by size: cheap enough for every token, fine enough for percentiles of the last seconds."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

FINE_SECONDS = tuple(round(1e-5 * 10 ** (place / 20), 9) for place in range(161))
"""20 bounds a decade from 10 us to 1000 s, so that a percentile is off by 6 % at most."""


class Histogram:
    """Counts values; a value belongs to the first bound that is not below it.

    Args:
        bounds: those that `buckets` tells, ascending.
        finer: bounds in between, for `quantile`.
    """

    def __init__(self, bounds: Sequence[float], finer: Sequence[float] = ()) -> None:
        self._told = tuple(bounds)
        self._bounds = sorted({*bounds, *finer})
        self.counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, so many times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> Iterator[tuple[float, int]]:
        """(bound, how many values are not above it); the last bound is infinite."""
        below, place = 0, 0
        for bound in self._told:
            end = bisect_left(self._bounds, bound) + 1
            below += sum(self.counts[place:end])
            place = end
            yield bound, below
        yield float("inf"), below + sum(self.counts[place:])

    def quantile(self, share: float, since: Sequence[int] | None = None) -> float | None:
        """The value that `share` of the values do not exceed, between two bounds as if they were
        spread evenly.

        Args:
            since: `counts` of an earlier time; values of before do not count.

        Returns:
            `None` without a value; the last bound for values above it.
        """
        counts = self.counts
        if since is not None:
            counts = [now - then for now, then in zip(self.counts, since, strict=True)]
        wanted = share * sum(counts)
        if not wanted:
            return None
        below, lower = 0, 0.0
        for bound, count in zip(self._bounds, counts, strict=False):
            if count and below + count >= wanted:
                return lower + (bound - lower) * (wanted - below) / count
            below, lower = below + count, bound
        return lower
