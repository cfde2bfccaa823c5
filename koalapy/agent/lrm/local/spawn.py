"""Start processes for locald: by fork alone if the program is the preloaded one, else by fork and exec."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from koalapy.agent.lrm.local.jobs import LocalJob
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


class Preloaded:
    """A program kept in memory: a Python file with a ``main(args)`` that returns its exit code."""

    def __init__(self, path: str) -> None:
        """Load the file. Raise ``ImportError`` if it cannot be loaded or has no ``main(args)``."""
        spec = importlib.util.spec_from_file_location("locald_preloaded", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except (OSError, SyntaxError) as error:
            raise ImportError(f"{path} cannot be loaded: {error}") from error
        if not callable(getattr(module, "main", None)):
            raise ImportError(f"{path} has no function main(args)")
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

    def spawn(self, job: LocalJob, environment: dict[str, str], secret: str = "") -> int:
        """Start the program of a job with an environment; return the process id. Raise ``OSError``.

        Another account's process is always started by exec: it must not be a copy of this one's memory.
        The process finds the number of a pipe with its secret in its environment. A failure after the fork ends it
        with 127 and a line in its output.
        """
        args = self._preloaded.parse_args(job.argv) if self._preloaded is not None and job.account is None else None
        parent = os.getpid()
        # A signal must not reach the handlers of this process in the new one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            if pid := os.fork():
                return pid
            code = 1
            try:
                os.close(self._end_pipe_writer)
                self._release()
                os.setsid()
                for signum in HANDLED_SIGNALS:
                    signal.signal(signum, signal.SIG_DFL)
                if args is None:
                    code = self._execute(job, environment, secret, parent)
                else:
                    code = self._run_preloaded(args, job, environment, secret)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:  # noqa: BLE001 no code of the forking program may run in this process
                sys.excepthook(*sys.exc_info())
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with suppress(OSError, ValueError):
                        stream.flush()
                os._exit(code & 0xFF)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _execute(self, job: LocalJob, environment: dict[str, str], secret: str, parent: int) -> int:
        """Execute a job's program in this process, as its account if it has one. Return 127 if that fails."""
        account = job.account
        ends_itself = self._preloaded is not None and self._preloaded.is_run_by(job.argv)
        if not ends_itself:
            die_with_parent(parent)
        if account is not None:
            os.setgroups(account["groups"])
            os.setresgid(account["gid"], account["gid"], account["gid"])
            os.setresuid(account["uid"], account["uid"], account["uid"])
            if not ends_itself:
                die_with_parent(parent)  # a change of account clears it
        self._add_pipes(environment, secret, with_end_pipe=ends_itself)
        try:
            redirect_streams(job.output, 0o644)
            os.chdir(job.cwd)
            for signum in (*_IGNORED_BY_PYTHON, signal.SIGINT):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(job.argv[0], job.argv, environment)
        except OSError as error:
            return _report_start_failure(job.argv[0], error)

    def _run_preloaded(self, args: list[str], job: LocalJob, environment: dict[str, str], secret: str) -> int:
        """Run the preloaded program in this process, and return its exit code; 127 if it cannot be started."""
        assert self._preloaded is not None
        try:
            redirect_streams(job.output, 0o644)
            os.chdir(job.cwd)
        except OSError as error:
            return _report_start_failure("the preloaded program", error)
        self._add_pipes(environment, secret, with_end_pipe=True)
        return self._preloaded.run(args, environment)

    def _add_pipes(self, environment: dict[str, str], secret: str, *, with_end_pipe: bool) -> None:
        """Add the numbers of a program's pipes to its environment, and let it inherit them."""
        if with_end_pipe:
            os.set_inheritable(self._end_pipe, True)
            environment[END_PIPE_VARIABLE] = str(self._end_pipe)
        if secret:
            reading, writing = os.pipe()
            os.write(writing, secret.encode())
            os.close(writing)
            os.set_inheritable(reading, True)
            environment[SECRET_PIPE_VARIABLE] = str(reading)


def _report_start_failure(program: str, error: OSError) -> int:
    """Print why a program cannot be started, and return the exit code for that."""
    print(f"locald: cannot start {program}: {error}", file=sys.stderr)
    return START_FAILED
