"""Distribution of computations over processes."""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from pydantic import TypeAdapter

A = TypeVar("A")
B = TypeVar("B")


def count_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def end_with_parent() -> None:
    """Make this worker exit when its parent is killed, and exit silently on an interrupt, which the parent reports."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def forked_map(function: Callable[[A], B], arguments: Sequence[A], processes: int, kind: type[B]) -> Iterator[B]:
    """Yield the function's value for each argument, computed by forked processes that inherit the state of this one.

    ``kind`` is the type of the values, which cross the process boundary as JSON. Call it only in a process without
    other threads. Raise ``RuntimeError`` when a process fails.
    """
    processes = min(processes, len(arguments))
    if processes < 2:
        yield from map(function, arguments)
        return
    adapter: TypeAdapter[B] = TypeAdapter(kind)
    fork = multiprocessing.get_context("fork")
    workers = []
    try:
        for first in range(processes):
            receiving, sending = fork.Pipe(duplex=False)
            worker = fork.Process(target=_send_values, args=(function, arguments, first, processes, adapter, sending))
            worker.start()
            sending.close()
            workers.append((worker, receiving))
        for number in range(len(arguments)):
            receiving = workers[number % processes][1]
            yield adapter.validate_python(json.loads(receiving.recv_bytes()))
    except EOFError as error:
        raise RuntimeError("a worker process of the simulation has failed; its traceback was printed before") from error
    finally:
        for worker, receiving in workers:
            receiving.close()
            worker.kill()
            worker.join()


def _send_values(
    function: Callable[[A], B],
    arguments: Sequence[A],
    first: int,
    step: int,
    adapter: "TypeAdapter[B]",
    sending: "Connection[Any, Any]",
) -> None:
    """Send the values of every ``step``-th argument, in order."""
    end_with_parent()
    for argument in arguments[first::step]:
        sending.send_bytes(json.dumps(adapter.dump_python(function(argument), mode="json")).encode())
