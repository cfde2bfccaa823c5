"""Work of many seconds in a process of its own, at a low priority: nothing that the daemon does waits for it."""

import asyncio
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

import structlog

from koalapy.model.errors import BusyError

log = structlog.get_logger()

A = TypeVarTuple("A")
B = TypeVar("B")
T = TypeVar("T")
SECONDS = 120.0
"""That it may take, and of a processor's time too, should the daemon be gone."""
NICENESS = 5
"""A third of what the daemon may have of a processor that both want. At 19 it would be a seventieth: on a machine that
others keep busy, as login nodes are, nothing would be worked out in time."""
RETRY_AFTER = 60.0
PIECE = 1000
"""Jobs, or the like, that are handed over at once."""


async def apart(function: Callable[[*A], B], *arguments: *A, seconds: float = SECONDS) -> B:
    """What a function of a module answers. The process ends when nobody waits for it any more.

    Arguments are handed over one by one, and others have their turn between them: what is large comes in pieces.
    ``BusyError`` when that takes too long or is killed, ``RuntimeError`` when it fails.
    """
    process = await asyncio.to_thread(_start)
    try:
        return await asyncio.to_thread(_answer, process, function, arguments, seconds)
    except TimeoutError as error:
        hint = "ask for less, as for fewer days, or for a simulation in which less happens"
        raise BusyError(f"that takes longer than {seconds:g} s", retry_after=RETRY_AFTER, hint=hint) from error
    except ChildProcessError as error:
        # Nobody else than the kernel, where memory is short, or a person does that to one that is waited for.
        log.error("work in a process of its own failed", action="apart-failed", error="it was killed")
        hint = "ask again, when the machine has more memory to spare"
        raise BusyError("the process that works it out was killed", retry_after=RETRY_AFTER, hint=hint) from error
    finally:
        _kill(process)


def pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Many things, as arguments that are not too large."""
    return (items[start : start + PIECE] for start in range(0, len(items), PIECE))


def _start() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", __spec__.name]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """With those that it has begun, also such as hang: they would keep its pipes open for ever."""
    if process.returncode is None:  # so that its number is still its own
        os.killpg(process.pid, signal.SIGKILL)


def _answer(process: "subprocess.Popen[bytes]", function: Callable[[*A], B], arguments: tuple[*A], seconds: float) -> B:
    assert process.stdin is not None
    began, end = time.monotonic(), threading.Timer(seconds, _kill, [process])
    end.start()
    try:
        with suppress(BrokenPipeError):  # it has ended, and says why, or was
            for each in (seconds, function, len(arguments), *arguments):
                process.stdin.write(pickle.dumps(each))
        told, errors = process.communicate()
    finally:
        end.cancel()
    if process.returncode < 0 and time.monotonic() - began >= seconds:
        raise TimeoutError
    if process.returncode == -signal.SIGKILL:
        raise ChildProcessError
    if process.returncode != 0:
        text = errors.decode(errors="replace").strip()[-2000:]
        log.error("work in a process of its own failed", action="apart-failed", error=text)
        raise RuntimeError(f"{function.__name__} failed in a process of its own: {text.splitlines()[-1:]}")
    answer: B = pickle.loads(told)  # it is our own process that has written it
    return answer


def _main() -> None:
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything prints is no answer
    seconds, function, count = (pickle.load(sys.stdin.buffer) for _ in range(3))
    arguments = [pickle.load(sys.stdin.buffer) for _ in range(count)]
    limit = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    with answers:
        answers.write(pickle.dumps(function(*arguments)))


if __name__ == "__main__":
    _main()
