"""Follows a standing wave on a string, points shared among the ranks, and compares with the closed form."""

import sys
import time

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from koalapy.apps import program

Points = NDArray[np.float64]


def closed_form(x: Points, t: float) -> Points:
    """Return u(x, t) = sin(2πx)·cos(2πt) + ½·sin(6πx)·cos(6πt), for speed 1 on the unit interval."""
    slow = np.sin(2 * np.pi * x) * np.cos(2 * np.pi * t)
    return np.asarray(slow + 0.5 * np.sin(6 * np.pi * x) * np.cos(6 * np.pi * t))


def step(now: Points, before: Points, left: float, right: float, courant: float) -> Points:
    """Return the next leapfrog step; ``left`` and ``right`` are the points of the neighbouring ranks."""
    padded = np.concatenate(([left], now, [right]))
    return np.asarray(2 * now - before + courant**2 * (padded[2:] - 2 * now + padded[:-2]))


def neighbours(world: MPI.Intracomm, u: Points) -> tuple[float, float]:
    """Return the points next to this rank's share; zeros at the ends of the string."""
    left, right = np.zeros(1), np.zeros(1)
    before = world.rank - 1 if world.rank > 0 else MPI.PROC_NULL
    after = world.rank + 1 if world.rank < world.size - 1 else MPI.PROC_NULL
    world.Sendrecv(u[:1].copy(), before, recvbuf=right, source=after)
    world.Sendrecv(u[-1:].copy(), after, recvbuf=left, source=before)
    return float(left[0]), float(right[0])


def main() -> int:
    world = MPI.COMM_WORLD
    options = program.parser(__doc__)
    options.add_argument("--points", type=int, default=2000)
    options.add_argument("--steps", type=int, default=800)
    options.add_argument("--tolerance", type=float, default=1e-3, help="largest error that passes")
    given = program.parse(options, world)
    if given.points < world.size or given.steps < 1:
        if world.rank == 0:
            print(f"--points must be at least {world.size}, a point for each rank, and --steps 1", file=sys.stderr)
        return 2
    started = time.perf_counter()
    first, last = program.block(given.points, world.rank, world.size)
    spacing = 1.0 / (given.points + 1)
    courant = 0.9
    delta = courant * spacing
    x = np.arange(first + 1, last + 1) * spacing
    before, now = closed_form(x, 0.0), closed_form(x, delta)
    for _ in range(given.steps - 1):
        before, now = now, step(now, before, *neighbours(world, now), courant)
    error = world.allreduce(float(np.abs(now - closed_form(x, given.steps * delta)).max()), op=MPI.MAX)
    took = time.perf_counter() - started
    result = f"wave: {given.points} points, {given.steps} steps, {world.size} ranks, {took:.2f} s"
    check = f"max error {error:.1e} <= {given.tolerance:.1e} against the closed form"
    return program.finish(world, result, check, error <= given.tolerance, given.where)


if __name__ == "__main__":
    sys.exit(main())
