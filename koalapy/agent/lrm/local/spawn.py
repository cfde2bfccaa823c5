"""Start processes for locald: in a worker if the program is the preloaded one, else by fork and exec."""

import gc
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from koalapy.agent.lrm.local.processes import die_with_parent, redirect_streams

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
    """All workers of locald: processes that run the preloaded program for one job after another.

    A fork of locald costs more processor time than the program that it runs: both copy every page that they change. So
    a process whose program has ended with 0 waits for the next job. Each has a pipe for its orders, and all have one
    for their reports.
    """

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


SECRET_PIPE_VARIABLE = "KOALA_SECRET_PIPE"
END_PIPE_VARIABLE = "KOALA_LRM_PIPE"
START_FAILED = 127
"""Exit code of a process if its program cannot be started."""
_ALL_SIGNALS = signal.valid_signals()
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_BARE_OPTIONS = frozenset({"-I", "-S", "-B", "-E", "-s", "-u"})


class PreloadError(Exception):
    """The file to preload cannot be read or has no ``main(args)``."""


class EndOfProcess:
    """A context manager after which the process ends, so that no code of the forking program runs in it."""

    code = 1

    def __enter__(self) -> "EndOfProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Print an exception, flush the output, and end the process with the code that Python would use."""
        if isinstance(error, SystemExit):
            self.code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif kind is not None and error is not None:
            sys.excepthook(kind, error, trace)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.code & 0xFF)


class Preloaded:
    """A program kept in memory: a Python file with a ``main(args)`` that returns its exit code.

    It returns 0 only when none of its processes is left. It may then be called again in the same process.
    """

    def __init__(self, path: str) -> None:
        """Load the file. Raise ``PreloadError``."""
        spec = importlib.util.spec_from_file_location("locald_preloaded", path)
        if spec is None or spec.loader is None:
            raise PreloadError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except (OSError, SyntaxError, ImportError) as error:
            raise PreloadError(f"{path} cannot be loaded: {error}") from error
        if not callable(getattr(module, "main", None)):
            raise PreloadError(f"{path} has no function main(args)")
        self._path, self._module = path, module
        self._loaded_at = os.stat(path).st_mtime_ns

    def is_run_by(self, argv: Sequence[str]) -> bool:
        """Return whether ``argv`` runs this file, which may have changed."""
        return self._path in argv[1:]

    def parse_args(self, argv: Sequence[str]) -> list[str] | None:
        """Return the program's own arguments; None if ``argv`` runs another program or the file has changed."""
        if not self.is_run_by(argv):
            return None
        position = argv.index(self._path, 1)
        with suppress(OSError):
            if _BARE_OPTIONS.issuperset(argv[1:position]) and os.stat(self._path).st_mtime_ns == self._loaded_at:
                return list(argv[position + 1 :])
        return None

    def run(self, args: list[str], env: Mapping[str, str]) -> int:
        """Run the program in this process and return its exit code."""
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [self._path, *args]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return int(self._module.main(args) or 0)


class Spawner:
    """Starts processes that lead their own session and end when this process ends.

    The preloaded program gets the number of a pipe in its environment. The pipe closes when this process ends, and the
    program then ends its own processes. Other programs are killed by the kernel.
    """

    def __init__(self, preloaded: Preloaded | None, release: Callable[[], None]) -> None:
        """``release`` closes, in the new process, everything that belongs to this one."""
        self._preloaded = preloaded
        self._release = release
        self._end_pipe, self._end_pipe_writer = os.pipe()
        """The end that the preloaded program reads, and the one that only this process has open."""
        self.workers = Workers()

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        output: str,
        *,
        account: Mapping[str, Any] | None = None,
        secret: str = "",
    ) -> int:
        """Start ``argv`` with its output appended to ``output``; return the process id. Raise ``OSError``.

        Another account's process is always started by exec: it must not be a copy of this one's memory.
        The process finds the number of a pipe with ``secret`` in its environment. A failure after the fork ends it
        with 127 and a line in its output.
        """
        order = Order([], dict(env), cwd, output, secret)
        args = self._preloaded.parse_args(argv) if self._preloaded is not None and account is None else None
        if args is None:
            parent = os.getpid()
            return self._fork(lambda: self._execute(argv, order, account, parent))
        order = replace(order, args=args)
        if (pid := self.workers.assign(order)) is not None:
            return pid
        orders, writer = os.pipe()
        try:
            pid = self._fork(lambda: self._serve(order, orders, writer))
        except OSError:
            os.close(writer)
            raise
        finally:
            os.close(orders)
        self.workers.add(pid, writer)
        return pid

    def _fork(self, run: Callable[[], int]) -> int:
        """Start a process that runs a function and ends with the code that it returns. Raise ``OSError``."""
        # A signal must not reach the handlers of this process in the new one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                with EndOfProcess() as end:
                    os.close(self._end_pipe_writer)
                    self._release()
                    self.workers.release()
                    os.setsid()
                    for signum in HANDLED_SIGNALS:
                        signal.signal(signum, signal.SIG_DFL)
                    end.code = run()
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _execute(self, argv: Sequence[str], order: Order, account: Mapping[str, Any] | None, parent: int) -> int:
        """Execute a program in this process, as an account if one is given. Return 127 if that fails."""
        ends_itself = self._preloaded is not None and self._preloaded.is_run_by(argv)
        if not ends_itself:
            die_with_parent(parent)
        if account is not None:
            os.setgroups(account["groups"])
            os.setresgid(account["gid"], account["gid"], account["gid"])
            os.setresuid(account["uid"], account["uid"], account["uid"])
            if not ends_itself:
                die_with_parent(parent)  # a change of account clears it
        environment = self._add_pipes(order, with_end_pipe=ends_itself)
        try:
            redirect_streams(order.output, 0o644)
            os.chdir(order.cwd)
            for signum in (*_IGNORED_BY_PYTHON, signal.SIGINT):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(argv[0], list(argv), environment)
        except OSError as error:
            return _report_start_failure(argv[0], error)

    def _serve(self, order: Order, orders: int, writer: int) -> int:
        """Run the preloaded program for one job after another as long as it returns 0. Return its last code."""
        os.close(writer)
        reader = OrderReader(orders, self.workers.report_writer, (self._end_pipe,))
        code = self._run_preloaded(order)
        for _ in range(1, MAX_JOBS):
            if code != 0 or not reader.is_reusable():
                break
            reader.report_end()
            if (following := reader.next_order()) is None:
                break
            code = self._run_preloaded(following)
        return code

    def _run_preloaded(self, order: Order) -> int:
        """Run the preloaded program for a job, and return its exit code; 127 if it cannot be started."""
        assert self._preloaded is not None
        try:
            redirect_streams(order.output, 0o644)
            os.chdir(order.cwd)
        except OSError as error:
            return _report_start_failure("the preloaded program", error)
        return self._preloaded.run(order.args, self._add_pipes(order, with_end_pipe=True))

    def _add_pipes(self, order: Order, *, with_end_pipe: bool) -> dict[str, str]:
        """Return the environment of a program with the numbers of its pipes, which it inherits."""
        environment = dict(order.env)
        if with_end_pipe:
            os.set_inheritable(self._end_pipe, True)
            environment[END_PIPE_VARIABLE] = str(self._end_pipe)
        if order.secret:
            reading, writing = os.pipe()
            os.write(writing, order.secret.encode())
            os.close(writing)
            os.set_inheritable(reading, True)
            environment[SECRET_PIPE_VARIABLE] = str(reading)
        return environment


def _report_start_failure(program: str, error: OSError) -> int:
    """Print why a program cannot be started, and return the exit code for that."""
    print(f"locald: cannot start {program}: {error}", file=sys.stderr)
    return START_FAILED
