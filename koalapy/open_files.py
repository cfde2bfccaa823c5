"""How many files this process may have open, and which errors only say that something has run out."""

import errno
import os
import resource

PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors that say nothing of the file or program that was asked for: the same may work in a moment."""


def raise_limit(wanted: int) -> int:
    """Allow this process so many open files, or as many as the system lets it; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return wanted if soft == resource.RLIM_INFINITY else soft


def how_many() -> tuple[int, int]:
    """How many are open, and how many may be."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return len(os.listdir("/proc/self/fd")), soft
    except OSError:  # not even one more to look
        return soft, soft
