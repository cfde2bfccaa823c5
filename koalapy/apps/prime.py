"""Counts the primes up to a limit, each rank sieving its share."""

import sys
import time

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from koalapy.apps import program

PRIME_COUNTS = {10: 4, 100: 25, 1000: 168, 10**4: 1229, 10**5: 9592, 10**6: 78498, 10**7: 664579, 10**8: 5761455}
"""The number of primes up to powers of ten."""


def small_primes(limit: int) -> NDArray[np.int64]:
    """Return all primes up to ``limit``, by the sieve of Eratosthenes."""
    sieve = np.ones(limit + 1, dtype=bool)
    sieve[:2] = False
    for number in range(2, int(limit**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = False
    return np.flatnonzero(sieve)


def count_between(start: int, end: int) -> int:
    """Return the number of primes p with start <= p < end."""
    start = max(start, 2)
    if end <= start:
        return 0
    sieve = np.ones(end - start, dtype=bool)
    for prime in small_primes(int(end**0.5) + 1).tolist():
        sieve[max(prime * prime, -(-start // prime) * prime) - start :: prime] = False
    return int(sieve.sum())


def count_by_sums(limit: int) -> int:
    """Return the number of primes up to ``limit`` by another method.

    It uses sums over the distinct values of limit // k (Lucy Hedgehog).
    """
    root = int(limit**0.5)
    values = [limit // k for k in range(1, root + 1)]
    values += list(range(values[-1] - 1, 0, -1)) if values else []
    counts = {v: v - 1 for v in values}
    for p in range(2, root + 1):
        if counts[p] > counts[p - 1]:
            smaller_primes = counts[p - 1]
            for v in values:
                if v < p * p:
                    break
                counts[v] -= counts[v // p] - smaller_primes
    return counts.get(limit, 0)


def main() -> int:
    """Run the program on this rank. Return its exit code: 0 if the check passed, 1 if not, 2 for invalid options."""
    world = MPI.COMM_WORLD
    options = program.create_parser(__doc__)
    options.add_argument("--limit", type=int, default=10**7)
    options.add_argument("--expect", type=int, help="the count to check against; default: the known one")
    arguments = program.parse_options(options, world)
    if arguments.limit < 1:
        if world.rank == 0:
            print(f"--limit is {arguments.limit}, but must be at least 1", file=sys.stderr)
        return 2
    started = time.perf_counter()
    first, last = program.rank_range(arguments.limit + 1, world.rank, world.size)
    count = world.allreduce(count_between(first, last), op=MPI.SUM)
    took = time.perf_counter() - started
    expected = arguments.expect
    if expected is None and world.rank == 0:
        expected = PRIME_COUNTS.get(arguments.limit) or count_by_sums(arguments.limit)
    expected = world.bcast(expected, root=0)
    result = f"prime: {count} primes up to {arguments.limit}, {world.size} ranks, {took:.2f} s"
    return program.print_report(world, result, f"{count} = {expected}", count == expected, arguments.where)


if __name__ == "__main__":
    sys.exit(main())
