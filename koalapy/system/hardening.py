"""Keep what this process was told from other processes of its account, jobs among them. Linux only."""

import os

PR_SET_DUMPABLE = 4
OWN_PREFIX = "KOALA_"
"""Begins the variables that are read here, and inherited by no child."""


def forbid_dumps() -> None:
    """Let only root read the memory of this process, and of those that it forks, from now on."""
    import ctypes  # not every command pays for it

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def scrub_environment() -> None:
    """Wipe the environment that this process was started with, and forbid dumps.

    The kernel shows these bytes for as long as the process lives, whatever becomes of its variables; so the variables
    are copied first.
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
    """Remove our variables from what children inherit."""
    for name in [name for name in os.environ if name.startswith(OWN_PREFIX)]:
        del os.environ[name]
