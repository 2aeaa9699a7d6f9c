"""A child that cannot outlive its parent.

Two ways, since each has a hole: the parent holds the other end of our stdin, which a thread here
watches, and the kernel is asked to kill us with the parent. The first needs Python to run, which a
device call that hangs may prevent; the second is lost when we come too late to ask for it.
"""

import ctypes
import os
import signal
import threading

PARENT_GONE = 3  # exit code
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make this process end at once when its parent does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_stdin, name="lifeline", daemon=True).start()


def _watch_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(PARENT_GONE)  # nobody is left to tell, and a step may be running
