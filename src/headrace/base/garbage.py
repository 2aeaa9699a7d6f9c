"""The garbage collector of a process that serves."""

import gc


def set_aside_what_stays() -> None:
    """Let the collector forget everything loaded so far; for processes that are ours alone.

    Else it looks through all of it now and then, for 100 ms and more in which nothing is done.
    """
    gc.collect()
    gc.freeze()
