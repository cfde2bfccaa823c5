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
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from itertools import islice
from typing import Any

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
VALUES_AT_ONCE = 100
MAX_LINE = 1 << 30
"""Bytes of an answer."""


async def run_in_subprocess(
    function: Function,
    values: Iterable[Json],
    *functions: Function,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    report: Callable[..., None] | None = None,
) -> Json:
    """Return the JSON value of ``function(*functions, iterator over values)``, computed in a child process.

    The values are encoded in a thread. The child is killed when the caller is cancelled. With ``report`` the function
    has a parameter of this name, and calls of it with JSON values are repeated here. Raise ``BusyError`` if it takes
    too long, was killed or could not be started, ``RuntimeError`` if it fails.
    """
    names = [f"{target.__module__}:{target.__qualname__}" for target in (function, *functions)]
    command = [sys.executable, "-m", __spec__.name, f"{timeout_s}", "" if report is None else "report", *names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
    with ExitStack() as resources:
        try:
            errors = resources.enter_context(tempfile.TemporaryFile())
            # A socket, because another process of this account could open the child's pipes through ``/proc/PID/fd``.
            ours, theirs = socket.socketpair()
            resources.enter_context(theirs)
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
            resources.callback(writer.close)
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            log.error("a worker process failed", action="subprocess-failed", error=f"it could not be started: {error}")
            hint = "ask again when the machine has free disk space, file descriptors and processes"
            raise BusyError("no worker process could be started", retry_after=RETRY_AFTER_S, hint=hint) from error
        theirs.close()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await _exchange_values(reader, writer, values, report)
                await process.wait()
        except TimeoutError as error:
            hint = "ask for less, as for fewer days, or for a simulation in which less happens"
            raise BusyError(
                f"the computation was stopped after {timeout_s:g} s", retry_after=RETRY_AFTER_S, hint=hint
            ) from error
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also the processes that it has started
                await process.wait()
        if process.returncode == -signal.SIGKILL:
            # Only the kernel, when memory is short, or an operator kills a child before its answer.
            log.error("a worker process failed", action="subprocess-failed", error="it was killed")
            hint = "ask again when the machine has more free memory"
            raise BusyError("the worker process was killed", retry_after=RETRY_AFTER_S, hint=hint)
        if process.returncode != 0:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_ERROR_SIZE))
            text = errors.read().decode(errors="replace").strip()
            log.error("a worker process failed", action="subprocess-failed", error=text)
            raise RuntimeError(f"{function.__name__} failed in a worker process: {text.splitlines()[-1:]}")
    return json.loads(answer)


async def _exchange_values(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    values: Iterable[Json],
    report: Callable[..., None] | None,
) -> bytes:
    """Send the values and return the answer in JSON, which is empty if the child fails. Repeat its reports."""
    if await reader.readline() != READY:  # from now on no other process can look into the child
        return b""
    sending = asyncio.create_task(_send_values(writer, iter(values)))
    try:
        while (line := await reader.readline()).startswith(PROGRESS):
            if report is not None:
                report(*json.loads(line[len(PROGRESS) :]))
        await sending
    except ConnectionError:
        return b""
    finally:
        sending.cancel()
    return line


async def _send_values(writer: asyncio.StreamWriter, values: Iterator[Json]) -> None:
    with suppress(OSError):  # the child has ended; its exit code says why
        try:
            while lines := await asyncio.to_thread(_encode_values, values):
                writer.write(lines)
                await writer.drain()
        finally:
            writer.write_eof()


def _encode_values(values: Iterator[Json]) -> bytes:
    """Return the next values as lines of JSON; empty after the last one."""
    return b"".join(json.dumps(v, separators=(",", ":")).encode() + b"\n" for v in islice(values, VALUES_AT_ONCE))


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
