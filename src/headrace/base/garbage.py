"""The garbage collector of a process that serves."""

import gc

COLLECT_AFTER = (5_000, 100, 1000)
"""Objects more than at the last collection; collections of the young before one of the middle ones;
and of those before one of all. Python's are 700, 10 and 10."""


def set_aside_what_stays() -> None:
    """Let the collector forget everything loaded so far and look less often at the rest; for
    processes that are ours alone.

    Else it looks through all of it now and then, for 100 ms and more in which nothing is done; with
    500 streams, through what these hold. It finds next to nothing there: a request goes when its
    last user does.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
