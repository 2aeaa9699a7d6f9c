"""How many files and sockets the server may have open: a connection is one."""

import resource

from headrace.base.log import get_logger

log = get_logger(__name__)

MOST = 65536  # more than a server has use for; some kernels take long over a million
_OUR_OWN = 32  # files, sockets and pipes that are no connection


def open_as_many_as_allowed(wanted: int) -> int:
    """Raise the soft limit of this process and its children to the hard one, up to `MOST`.

    Args:
        wanted: connections, fewer than which are worth a warning.

    Returns:
        The limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < wanted + _OUR_OWN:
        log.warning(
            "Only %d files and sockets may be open (ulimit -n): clients beyond about %d at a time "
            "are hung up on without an answer",
            soft,
            max(0, soft - _OUR_OWN),
        )
    return soft
