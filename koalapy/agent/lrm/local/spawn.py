"""Start processes for locald: by fork alone if the program is the preloaded one, else by fork and exec."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from koalapy.agent.lrm.local.processes import die_with_parent, redirect_streams

SECRET_PIPE_VARIABLE = "KOALA_SECRET_PIPE"
END_PIPE_VARIABLE = "KOALA_LRM_PIPE"
START_FAILED = 127
"""Exit code of a process if its program cannot be started."""
_ALL_SIGNALS = signal.valid_signals()
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
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
        if not _BARE_OPTIONS.issuperset(argv[1:position]) or os.stat(self._path).st_mtime_ns != self._loaded_at:
            return None
        return list(argv[position + 1 :])

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
        parent = os.getpid()
        secret_pipe = -1
        if secret:
            secret_pipe, writer = os.pipe()
            os.write(writer, secret.encode())
            os.close(writer)
        ends_itself = self._preloaded is not None and self._preloaded.is_run_by(argv)
        # A signal must not reach the handlers of this process in the new one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                with EndOfProcess() as end:
                    os.close(self._end_pipe_writer)
                    if ends_itself:
                        os.set_inheritable(self._end_pipe, True)
                        env = {**env, END_PIPE_VARIABLE: str(self._end_pipe)}
                    else:
                        die_with_parent(parent)
                        os.close(self._end_pipe)
                    self._release()
                    if secret:
                        os.set_inheritable(secret_pipe, True)
                        env = {**env, SECRET_PIPE_VARIABLE: str(secret_pipe)}
                    if account is not None:
                        self._preloaded = None
                        os.setgroups(account["groups"])
                        os.setresgid(account["gid"], account["gid"], account["gid"])
                        os.setresuid(account["uid"], account["uid"], account["uid"])
                        if not ends_itself:
                            die_with_parent(parent)  # a change of account clears it
                    end.code = self._become(argv, env, cwd, output)
            return pid
        finally:
            if secret:
                os.close(secret_pipe)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, output: str) -> int:
        """Run the program in this process; return the exit code of the preloaded one, or 127."""
        os.setsid()
        for signum in _HANDLED:
            signal.signal(signum, signal.SIG_DFL)
        try:
            redirect_streams(output, 0o644)
            os.chdir(cwd)
            args = self._preloaded.parse_args(argv) if self._preloaded else None
            if args is None or self._preloaded is None:
                for signum in (*_IGNORED_BY_PYTHON, signal.SIGINT):
                    signal.signal(signum, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.execvpe(argv[0], list(argv), dict(env))
        except OSError as error:
            print(f"locald: cannot start {argv[0]}: {error}", file=sys.stderr)
            return START_FAILED
        return self._preloaded.run(args, env)
