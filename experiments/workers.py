"""Start worker processes for cells, on this machine or as ranks of an MPI job."""

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from koalapy.simulation.processes import count_processors, end_with_parent


@contextmanager
def start_workers(jobs: int | None = None) -> Iterator[Executor]:
    """Yield an executor with ``jobs`` processes, by default one per processor, or with its ranks under MPI."""
    if is_mpi():
        from mpi4py.futures import MPIPoolExecutor

        with MPIPoolExecutor() as ranks:
            yield ranks
        return
    pool = ProcessPoolExecutor(
        jobs or count_processors(), multiprocessing.get_context("spawn"), initializer=end_with_parent
    )
    try:
        yield pool
    except BaseException:
        # Do not wait for cancelled cells, which may take minutes.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    else:
        pool.shutdown()


def is_mpi() -> bool:
    """Return whether ``mpi4py.futures`` has started this program."""
    core = sys.modules.get("mpi4py.futures._core")
    return core is not None and core.SharedPool is not None
