"""Keeps from other processes of this account, jobs among them, what a daemon or an agent was told. Linux only."""

import os

PR_SET_DUMPABLE = 4
OWN = "KOALA_"
"""How the variables begin that are ours to read, and nobody's to inherit."""


def conceal() -> None:
    """From now on nobody but root reads this process's memory or the environment it was started with.

    The kernel shows the bytes that a process was started with for as long as it lives, whatever becomes of its
    variables; so these are copied and the bytes wiped.
    """
    import ctypes  # not every command pays for it

    for name, value in os.environb.items():
        os.putenv(name, value)
    start, end = _environment_bytes()
    ctypes.memset(start, 0, end - start)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def forget_own() -> None:
    """Have no process that is started from here inherit our variables."""
    for name in [name for name in os.environ if name.startswith(OWN)]:
        del os.environ[name]


def _environment_bytes() -> tuple[int, int]:
    """Where the kernel put the environment: first address, and the one after the last."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return int(fields[47]), int(fields[48])
