import gc

from headrace.base.garbage import set_aside_what_stays


def test_what_stays_is_not_looked_through_again() -> None:
    """Streams hold ten thousands of objects: the whole is looked through after many of these."""
    thresholds = gc.get_threshold()
    try:
        stays = [[] for _ in range(1000)]
        set_aside_what_stays()
        assert gc.get_freeze_count() >= len(stays)
        young, middle, old = gc.get_threshold()
        assert young * middle * old > 100 * 700 * 10 * 10
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
