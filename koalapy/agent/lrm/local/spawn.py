"""Start processes for locald: by fork alone if the program is the preloaded one, else by fork and exec."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from koalapy.agent.lrm.local.processes import die_with_parent, redirect_streams

HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
"""Signals that locald or its preloaded program handles."""
SECRET_PIPE_VARIABLE = "KOALA_SECRET_PIPE"
END_PIPE_VARIABLE = "KOALA_LRM_PIPE"
START_FAILED = 127
"""Exit code of a process if its program cannot be started."""
_ALL_SIGNALS = signal.valid_signals()
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_BARE_OPTIONS = frozenset({"-I", "-S", "-B", "-E", "-s", "-u"})


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What a new process gets from its job."""

    env: Mapping[str, str]
    cwd: str
    output: str
    """File to which the program's output is appended."""
    secret: str = field(default="", repr=False)
    """Text for a pipe that only the program reads."""


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
    """A program kept in memory: a Python file with a ``main(args)`` that returns its exit code."""

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

    def spawn(self, argv: Sequence[str], settings: ProcessSettings, account: Mapping[str, Any] | None = None) -> int:
        """Start ``argv`` with these settings; return the process id. Raise ``OSError``.

        Another account's process is always started by exec: it must not be a copy of this one's memory.
        The process finds the number of a pipe with its secret in its environment. A failure after the fork ends it
        with 127 and a line in its output.
        """
        args = self._preloaded.parse_args(argv) if self._preloaded is not None and account is None else None
        if args is None:
            parent = os.getpid()
            return self._fork(lambda: self._execute(argv, settings, account, parent))
        return self._fork(partial(self._run_preloaded, args, settings))

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
                    os.setsid()
                    for signum in HANDLED_SIGNALS:
                        signal.signal(signum, signal.SIG_DFL)
                    end.code = run()
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _execute(
        self, argv: Sequence[str], settings: ProcessSettings, account: Mapping[str, Any] | None, parent: int
    ) -> int:
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
        environment = self._add_pipes(settings, with_end_pipe=ends_itself)
        try:
            redirect_streams(settings.output, 0o644)
            os.chdir(settings.cwd)
            for signum in (*_IGNORED_BY_PYTHON, signal.SIGINT):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(argv[0], list(argv), environment)
        except OSError as error:
            return _report_start_failure(argv[0], error)

    def _run_preloaded(self, args: list[str], settings: ProcessSettings) -> int:
        """Run the preloaded program in this process, and return its exit code; 127 if it cannot be started."""
        assert self._preloaded is not None
        try:
            redirect_streams(settings.output, 0o644)
            os.chdir(settings.cwd)
        except OSError as error:
            return _report_start_failure("the preloaded program", error)
        return self._preloaded.run(args, self._add_pipes(settings, with_end_pipe=True))

    def _add_pipes(self, settings: ProcessSettings, *, with_end_pipe: bool) -> dict[str, str]:
        """Return the environment of a program with the numbers of its pipes, which it inherits."""
        environment = dict(settings.env)
        if with_end_pipe:
            os.set_inheritable(self._end_pipe, True)
            environment[END_PIPE_VARIABLE] = str(self._end_pipe)
        if settings.secret:
            reading, writing = os.pipe()
            os.write(writing, settings.secret.encode())
            os.close(writing)
            os.set_inheritable(reading, True)
            environment[SECRET_PIPE_VARIABLE] = str(reading)
        return environment


def _report_start_failure(program: str, error: OSError) -> int:
    """Print why a program cannot be started, and return the exit code for that."""
    print(f"locald: cannot start {program}: {error}", file=sys.stderr)
    return START_FAILED
