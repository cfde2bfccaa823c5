"""Starts processes for locald: by fork alone when the program is the preloaded one, else by fork and exec."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from koalapy.agent.lrm.local.processes import die_with_parent

_ALL_SIGNALS = signal.valid_signals()
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
PIPE = "KOALA_SECRET_PIPE"
END_PIPE = "KOALA_LRM_PIPE"
_BARE_OPTIONS = frozenset({"-I", "-S", "-B", "-E", "-s", "-u"})


class PreloadError(Exception):
    """The file to preload cannot be read or has no ``main(args)``."""


class EndOfProcess:
    """A block with which the process ends, whatever happens in it: nothing of the forking program runs after it."""

    code = 1

    def __enter__(self) -> "EndOfProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Raises ``PreloadError``."""
        self._path = path
        self._module = _load(path)
        self._loaded_at = os.stat(path).st_mtime_ns

    def is_run_by(self, argv: Sequence[str]) -> bool:
        """Whether it is what ``argv`` would run, be its file the same or not."""
        return self._path in argv[1:]

    def args_of(self, argv: Sequence[str]) -> list[str] | None:
        """The program's own arguments, if it is what ``argv`` would run and its file is still the same."""
        if not self.is_run_by(argv):
            return None
        position = argv.index(self._path, 1)
        if not _BARE_OPTIONS.issuperset(argv[1:position]) or os.stat(self._path).st_mtime_ns != self._loaded_at:
            return None
        return list(argv[position + 1 :])

    def run(self, args: list[str], env: Mapping[str, str]) -> int:
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [self._path, *args]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return int(self._module.main(args) or 0)


class Spawner:
    """Starts processes, each leading a session of its own, that end when this process ends.

    The preloaded program gets a pipe that ends then, whose number is in its environment: it ends what it has started.
    Other programs are killed by the kernel.
    """

    def __init__(self, preloaded: Preloaded | None, release: Callable[[], None]) -> None:
        """``release`` closes, in the new process, all that belongs to the old one."""
        self._preloaded = preloaded
        self._release = release
        self._end_pipe, self._life = os.pipe()
        """What the preloaded program reads, and the end that no process but this one has open."""

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
        """Start ``argv`` with its output appended to ``output``; returns the process id.

        As another account it is never a copy of this process, whose memory that account may not read.
        A ``secret`` is read from the pipe whose number is in the environment. What fails after the fork ends the new
        process with 127 and a line in its output. Raises ``OSError``.
        """
        parent = os.getpid()
        pipe = _pipe_with(secret) if secret else -1
        ends_itself = self._preloaded is not None and self._preloaded.is_run_by(argv)
        # A signal must not meet the handlers of this process in the new one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                with EndOfProcess() as end:
                    os.close(self._life)
                    if ends_itself:
                        os.set_inheritable(self._end_pipe, True)
                        env = {**env, END_PIPE: str(self._end_pipe)}
                    else:
                        die_with_parent(parent)
                        os.close(self._end_pipe)
                    self._release()
                    if secret:
                        os.set_inheritable(pipe, True)
                        env = {**env, PIPE: str(pipe)}
                    if account is None:
                        end.code = self._become(argv, env, cwd, output)
                    else:
                        end.code = self._become_another(
                            account, None if ends_itself else parent, argv, env, cwd, output
                        )
            return pid
        finally:
            if secret:
                os.close(pipe)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _become_another(
        self,
        account: Mapping[str, Any],
        parent: int | None,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        output: str,
    ) -> int:
        self._preloaded = None
        os.setgroups(account["groups"])
        os.setresgid(account["gid"], account["gid"], account["gid"])
        os.setresuid(account["uid"], account["uid"], account["uid"])
        if parent is not None:
            die_with_parent(parent)  # the kernel forgets that with a change of account
        return self._become(argv, env, cwd, output)

    def _become(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, output: str) -> int:
        os.setsid()
        for signum in _HANDLED:
            signal.signal(signum, signal.SIG_DFL)
        try:
            _redirect(output)
            os.chdir(cwd)
            args = self._preloaded.args_of(argv) if self._preloaded else None
            if args is None or self._preloaded is None:
                _exec(argv, env)
        except OSError as error:
            print(f"locald: cannot start {argv[0]}: {error}", file=sys.stderr)
            return 127
        return self._preloaded.run(args, env)


def _pipe_with(secret: str) -> int:
    """Where it can be read, once."""
    reading, writing = os.pipe()
    os.write(writing, secret.encode())
    os.close(writing)
    return reading


def _load(path: str) -> ModuleType:
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
    return module


def _redirect(output: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    sink = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(nothing, 0)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(nothing)
    os.close(sink)


def _exec(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    for signum in (*_IGNORED_BY_PYTHON, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvpe(argv[0], list(argv), dict(env))
