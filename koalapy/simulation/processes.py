"""Work that goes over processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")


def processors() -> int:
    """Of how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def end_with_parent() -> None:
    """A parent that was killed leaves no workers behind; and that there was an interrupt the parent tells alone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def forked_map(function: Callable[[A], B], arguments: Sequence[A], processes: int) -> list[B]:
    """What a function answers for each argument, by so many processes, which begin with all that this one has.

    For processes without threads only. Answers are handed over by pickle, the function and its arguments are not.
    """
    processes = min(processes, len(arguments))
    if processes < 2:
        return [function(each) for each in arguments]
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, initializer=_inherit, initargs=(function, arguments)) as pool:
        return list(pool.map(_nth, range(len(arguments))))


_inherited: tuple[Callable[[Any], Any], Sequence[Any]]


def _inherit(function: Callable[[A], B], arguments: Sequence[A]) -> None:
    global _inherited
    _inherited = function, arguments
    end_with_parent()


def _nth(number: int) -> Any:
    function, arguments = _inherited
    return function(arguments[number])
