"""Processes of locald that run the preloaded program for one job after another.

A fork of locald costs more processor time than the program that it runs: both copy every page that they change. So a
worker, a process whose program has ended with 0, waits for the next job.
"""

import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

from koalapy.agent.lrm.local.processes import redirect_streams

MAX_JOBS = 100
"""Jobs after which a worker ends, so that what they leave in its memory remains small."""
HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
"""Signals that locald or its preloaded program handles."""
MEMORY_GROWTH_KB = 4096
"""Growth of its peak memory with which a worker ends."""
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_PID_BYTES = 4
_MAX_ORDER_BYTES = 65536
"""Capacity of a pipe: a longer order would wait for its worker."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker needs to run the preloaded program for a job."""

    args: list[str]
    env: dict[str, str]
    cwd: str
    output: str
    """File to which the program's output is appended."""
    secret: str = ""
    """Text for a pipe that only the program reads."""


class Workers:
    """All workers of locald, each with a pipe for its orders, and one pipe for the reports of all."""

    def __init__(self) -> None:
        self.reports, self.report_writer = os.pipe()
        """The ends of the pipe in which workers write their process ids when a job has ended."""
        os.set_blocking(self.reports, False)
        self._orders: dict[int, int] = {}
        """The pipe of each worker by process id; -1 if it was closed, which ends the worker."""
        self._idle_since: dict[int, float] = {}
        """Workers without a job, the one that became idle last at the end."""

    def __iter__(self) -> Iterator[int]:
        """Yield the process ids of all workers that have not been reaped."""
        return iter(self._orders)

    def add(self, pid: int, orders: int) -> None:
        """Record a new worker that runs its first job, and the writing end of its pipe."""
        os.set_blocking(orders, False)  # its worker may be stopped
        self._orders[pid] = orders

    def assign(self, order: Order) -> int | None:
        """Let an idle worker run a job; return its process id, or None if there is none."""
        line = json.dumps(asdict(order)).encode() + b"\n"
        while self._idle_since and len(line) <= _MAX_ORDER_BYTES:
            pid, _ = self._idle_since.popitem()
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)  # it may have been stopped
                if os.write(self._orders[pid], line) == len(line):
                    return pid
            self.retire(pid)
        return None

    def take_reports(self) -> list[int]:
        """Return the process ids of the workers whose jobs have ended since the last call."""
        try:
            reports = os.read(self.reports, 1024 * _PID_BYTES)
        except BlockingIOError:
            return []
        starts = range(0, len(reports), _PID_BYTES)
        return [int.from_bytes(reports[start : start + _PID_BYTES], "little") for start in starts]

    def mark_idle(self, pid: int) -> None:
        """Keep a worker for the next job."""
        self._idle_since[pid] = time.monotonic()

    def retire(self, pid: int) -> None:
        """Let a worker end after its present job."""
        self._idle_since.pop(pid, None)
        orders, self._orders[pid] = self._orders[pid], -1
        if orders >= 0:
            os.close(orders)

    def retire_idle(self, seconds: float) -> bool:
        """Let the workers end that were idle for so many seconds. Return whether others are idle."""
        horizon = time.monotonic() - seconds
        for pid in [pid for pid, since in self._idle_since.items() if since <= horizon]:
            self.retire(pid)
        return bool(self._idle_since)

    def remove(self, pid: int) -> None:
        """Forget an ended process, if it was a worker."""
        if pid in self._orders:
            self.retire(pid)
            del self._orders[pid]

    def release(self) -> None:
        """Close, in a fork, the pipes of the other workers and the reports of all."""
        os.close(self.reports)
        for orders in self._orders.values():
            if orders >= 0:
                os.close(orders)


class OrderReader:
    """A worker's own ends of its pipes."""

    def __init__(self, orders: int, reports: int, kept_files: tuple[int, ...]) -> None:
        """``kept_files``: further file descriptors that remain open for the next job."""
        self._orders, self._reports = orders, reports
        self._kept_files = {0, 1, 2, orders, reports, *kept_files}
        self._file_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._state = _read_state()
        self._max_memory = _peak_memory_kb() + MEMORY_GROWTH_KB
        gc.disable()  # so all garbage of a job is young at its end, and no page of locald's older objects is copied

    def is_reusable(self) -> bool:
        """Return whether a next job would notice nothing of the last one.

        A program may have changed limits or priorities of its parent. The kernel counts the peak memory of this process
        for every program that it starts.
        """
        return _read_state() == self._state and _peak_memory_kb() <= self._max_memory

    def report_end(self) -> None:
        """Undo what the program has changed in this process, and report the end of its job."""
        signal.set_wakeup_fd(-1)
        for signum in HANDLED_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        gc.collect(0)  # before files are closed, so that no later destructor closes a file of the next job
        # Without the system call close_range, os.closerange tries each number up to the limit.
        for number in set(map(int, os.listdir("/proc/self/fd"))) - self._kept_files:
            with suppress(OSError):  # that of the listing itself
                os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._file_limits)
        redirect_streams(os.devnull, 0o644)
        os.chdir("/")
        os.write(self._reports, os.getpid().to_bytes(_PID_BYTES, "little"))

    def next_order(self) -> Order | None:
        """Wait for the next order; return None if locald has ended or needs this worker no more."""
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(self._orders, _MAX_ORDER_BYTES)
            if not piece:
                return None
            line += piece
        return Order(**json.loads(line))


def _read_state() -> tuple[object, ...]:
    """Return what other processes of the account can change in this one; of open files, only the hard limit."""
    limits = [resource.getrlimit(limit) for limit in _LIMITS if limit != resource.RLIMIT_NOFILE]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return limits, hard, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)


def _peak_memory_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
