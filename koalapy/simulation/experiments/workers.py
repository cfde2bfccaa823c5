"""Processes that run cells: of this machine, or those of an MPI job."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait


@contextmanager
def workers(jobs: int | None = None) -> Iterator[Executor]:
    """``jobs`` processes, by default one for each processor; under ``python -m mpi4py.futures`` that job's ranks."""
    if is_mpi():
        from mpi4py.futures import MPIPoolExecutor

        with MPIPoolExecutor() as ranks:
            yield ranks
        return
    pool = ProcessPoolExecutor(
        jobs or len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn"), initializer=_end_with_parent
    )
    try:
        yield pool
    except BaseException:
        # A cell may take minutes: nobody waits for those that nobody wants any more.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    else:
        pool.shutdown()


def is_mpi() -> bool:
    """Whether ``mpi4py.futures`` has started this program."""
    core = sys.modules.get("mpi4py.futures._core")
    return core is not None and core.SharedPool is not None


def _end_with_parent() -> None:
    """A parent that was killed leaves no workers behind; and that there was an interrupt the parent tells alone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
