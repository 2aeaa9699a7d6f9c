"""When requests are sent."""

import math

import numpy


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each of `count` requests arrives.

    Args:
        rate: mean requests a second of a Poisson process, whose gaps are exponential; infinite:
            all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = numpy.random.default_rng(seed).exponential(1.0 / rate, count)
    times: list[float] = (gaps.cumsum() - gaps[0]).tolist() if count else []
    return times
