"""Repeats MPI_Allgather and verifies the received numbers, as the communication-bound program of sonmez-2010."""

import sys
import time

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from koalapy.apps import program


def make_pattern(rank: int, turn: int, count: int) -> NDArray[np.int64]:
    """Return the numbers that a rank sends in repetition ``turn``."""
    return np.arange(count, dtype=np.int64) + 1_000_003 * rank + turn


def is_right(received: NDArray[np.int64], turn: int) -> bool:
    """Return whether each received row is what its rank sent in repetition ``turn``."""
    return all(np.array_equal(row, make_pattern(rank, turn, len(row))) for rank, row in enumerate(received))


def main() -> int:
    """Run the program on this rank. Return its exit code: 0 if the check passed, 1 if not, 2 for invalid options."""
    world = MPI.COMM_WORLD
    options = program.create_parser(__doc__)
    options.add_argument("--count", type=int, default=1000, help="numbers of 8 bytes from each rank")
    options.add_argument("--repeats", type=int, default=100)
    arguments = program.parse_options(options, world)
    if arguments.count < 1 or arguments.repeats < 1:
        if world.rank == 0:
            print("--count and --repeats must be at least 1", file=sys.stderr)
        return 2
    received = np.empty((world.size, arguments.count), dtype=np.int64)
    right = 0
    spent = 0.0
    for turn in range(arguments.repeats):
        mine = make_pattern(world.rank, turn, arguments.count)
        started = time.perf_counter()
        world.Allgather(mine, received)
        spent += time.perf_counter() - started
        right += is_right(received, turn)
    total = world.allreduce(right, op=MPI.SUM)
    calls = arguments.repeats * world.size
    mean = world.allreduce(spent, op=MPI.SUM) / calls
    result = f"allgather: {arguments.count * 8} bytes from each of {world.size} ranks, {1e6 * mean:.0f} µs a call"
    return program.print_report(
        world, result, f"{total} of {calls} calls brought what was sent", total == calls, arguments.where
    )


if __name__ == "__main__":
    sys.exit(main())
