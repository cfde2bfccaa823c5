"""Protect this process from other processes of its account, and raise its limit of open files. Linux only.

Imports the standard library only, since programs on nodes import it, too.
"""

import errno
import os
import resource

TRANSIENT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of a system that is short of files or memory: the same call may succeed a moment later."""
PR_SET_DUMPABLE = 4
VARIABLE_PREFIX = "KOALA_"
"""Prefix of the environment variables that our processes read and no child inherits."""


def forbid_dumps() -> None:
    """Let only root read the memory of this process and of those it forks, from now on."""
    import ctypes  # slow to import, and most commands do not need it

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def scrub_environment() -> None:
    """Overwrite the environment that this process was started with, and forbid dumps.

    ``/proc`` shows the original bytes for as long as the process lives, whatever happens to its variables. The
    variables themselves are copied first and keep their values.
    """
    import ctypes

    for name, value in os.environb.items():
        os.putenv(name, value)
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    forbid_dumps()


def drop_own_variables() -> None:
    """Remove our variables from the environment that children inherit."""
    for name in [name for name in os.environ if name.startswith(VARIABLE_PREFIX)]:
        del os.environ[name]


def raise_file_limit(count: int) -> int:
    """Allow this process ``count`` open files, or as many as the hard limit permits; return the number allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return count if soft == resource.RLIM_INFINITY else soft


def count_open_files() -> tuple[int, int]:
    """Return the number of open files of this process and its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return len(os.listdir("/proc/self/fd")), soft
    except OSError:  # there is no file left to list them with
        return soft, soft
