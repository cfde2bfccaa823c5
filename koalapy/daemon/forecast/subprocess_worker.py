"""Run long computations in a child process at low priority, so that the daemon goes on serving.

Values cross the process boundary as lines of JSON, which cannot carry code. The functions to call are named on the
child's command line, which no other process can write.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO, Any

import structlog

from koalapy.model.errors import BusyError
from koalapy.system.process import VARIABLE_PREFIX, scrub_environment

log = structlog.get_logger()

Json = Any
Function = Callable[..., Any]
"""A function of a module."""
DEFAULT_TIMEOUT_S = 120.0
"""The limit of the computation's duration, and of its processor time in case the daemon is gone."""
NICENESS = 5
"""Gives the child a third of a processor that the daemon wants as well. At 19 it would be a seventieth: on a busy
machine, such as a login node, it would get no time at all."""
RETRY_AFTER_S = 60.0
MAX_ERROR_SIZE = 2000
"""Bytes of the child's standard error that are logged."""
READY = b"\n"
PROGRESS = b"#"
"""Begins a line of progress, which no answer in JSON begins with."""


async def run_in_subprocess(
    function: Function,
    values: Iterable[Json],
    *functions: Function,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    report: Callable[..., None] | None = None,
) -> Json:
    """Return the JSON value of ``function(*functions, iterator over values)``, computed in a child process.

    The values are encoded one by one in a thread, and other threads run between two of them. The child is killed when
    the caller is cancelled. With ``report`` the function has a parameter of this name, and calls of it with JSON values
    are repeated here. Raise ``BusyError`` if it takes too long or was killed, ``RuntimeError`` if it fails.
    """
    loop = asyncio.get_running_loop()

    def repeat_report(line: bytes) -> None:
        if report is not None:
            loop.call_soon_threadsafe(report, *json.loads(line))

    with tempfile.TemporaryFile() as errors:
        parameter = "" if report is None else "report"
        process, channel = await asyncio.to_thread(_start_child, (function, *functions), timeout_s, errors, parameter)
        try:
            return await asyncio.to_thread(_exchange_values, process, channel, values, timeout_s, repeat_report)
        except TimeoutError as error:
            hint = "ask for less, as for fewer days, or for a simulation in which less happens"
            raise BusyError(
                f"the computation was stopped after {timeout_s:g} s", retry_after=RETRY_AFTER_S, hint=hint
            ) from error
        except _Killed as error:
            # Only the kernel, when memory is short, or an operator kills a child before its answer.
            log.error("a worker process failed", action="subprocess-failed", error="it was killed")
            hint = "ask again when the machine has more free memory"
            raise BusyError("the worker process was killed", retry_after=RETRY_AFTER_S, hint=hint) from error
        except _Failed as error:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_ERROR_SIZE))
            text = errors.read().decode(errors="replace").strip()
            log.error("a worker process failed", action="subprocess-failed", error=text)
            last_line = text.splitlines()[-1:]
            raise RuntimeError(f"{function.__name__} failed in a worker process: {last_line}") from error
        finally:
            _kill_child(process)


class _Killed(Exception):
    """The child was ended by SIGKILL before its timeout."""


class _Failed(Exception):
    """The child ended with an error."""


def _start_child(
    functions: Sequence[Function], timeout_s: float, errors: IO[bytes], parameter: str = ""
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start the child; return it and our end of the socket that is its standard input and output.

    It is a socket because another process of this account could open the child's pipes through ``/proc/PID/fd``.
    """
    ours, theirs = socket.socketpair()
    names = [f"{function.__module__}:{function.__qualname__}" for function in functions]
    command = [sys.executable, "-m", __spec__.name, f"{timeout_s}", parameter, *names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
    try:
        with theirs:
            process = subprocess.Popen(
                command, env=environment, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=errors, process_group=0
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def _kill_child(process: "subprocess.Popen[bytes]") -> None:
    """Kill the child and all processes that it has started: a hanging one would keep the socket open."""
    if process.returncode is None:  # a reaped child's process id may belong to another process
        os.killpg(process.pid, signal.SIGKILL)


def _exchange_values(
    process: "subprocess.Popen[bytes]",
    channel: socket.socket,
    values: Iterable[Json],
    timeout_s: float,
    repeat_report: Callable[[bytes], None],
) -> Json:
    """Send the values, wait for the answer and the child's end."""
    began, end = time.monotonic(), threading.Timer(timeout_s, _kill_child, [process])
    end.start()
    answer = bytearray()
    try:
        with channel, suppress(ConnectionError):  # the child has ended; its exit code says why
            if channel.recv(len(READY)) == READY:  # from now on no other process can look into the child
                for value in values:
                    channel.sendall(json.dumps(value, separators=(",", ":")).encode() + b"\n")
                channel.shutdown(socket.SHUT_WR)
                while piece := channel.recv(1 << 20):
                    answer += piece
                    while answer.startswith(PROGRESS) and (end_of_line := answer.find(b"\n")) >= 0:
                        repeat_report(bytes(answer[1:end_of_line]))
                        del answer[: end_of_line + 1]
        process.wait()
    finally:
        end.cancel()
    if process.returncode < 0 and time.monotonic() - began >= timeout_s:
        raise TimeoutError
    if process.returncode == -signal.SIGKILL:
        raise _Killed
    if process.returncode != 0:
        raise _Failed
    return json.loads(answer)


def _find_function(name: str) -> Function:
    module, _, path = name.partition(":")
    target: Any = import_module(module)
    for part in path.split("."):
        target = getattr(target, part)
    return target  # type: ignore[no-any-return]


def _run_child() -> None:
    """Compute one answer in the child process: call the named functions on the JSON lines of standard input.

    Write the answer as JSON to standard output. The CPU time is limited in seconds.
    """
    scrub_environment()
    os.nice(NICENESS)
    timeout_s, parameter, *names = sys.argv[1:]
    limit = int(float(timeout_s)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the computation prints is not part of the answer
    channel.write(READY)
    channel.flush()
    function, *functions = map(_find_function, names)

    def report(*values: Json) -> None:
        channel.write(PROGRESS + json.dumps(values, separators=(",", ":")).encode() + b"\n")
        channel.flush()

    options = {parameter: report} if parameter else {}
    answer = function(*functions, map(json.loads, sys.stdin.buffer), **options)
    with channel:
        channel.write(json.dumps(answer, separators=(",", ":")).encode())


if __name__ == "__main__":
    _run_child()
