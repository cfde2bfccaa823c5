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


def next_points(now: Points, previous: Points, left_point: float, right_point: float, courant: float) -> Points:
    """Return the next leapfrog step; ``left_point`` and ``right_point`` belong to the neighbouring ranks."""
    padded = np.concatenate(([left_point], now, [right_point]))
    return np.asarray(2 * now - previous + courant**2 * (padded[2:] - 2 * now + padded[:-2]))


def exchange_points(world: MPI.Intracomm, u: Points) -> tuple[float, float]:
    """Return the points left and right of this rank's points; zeros at the ends of the string."""
    left_point, right_point = np.zeros(1), np.zeros(1)
    left_rank = world.rank - 1 if world.rank > 0 else MPI.PROC_NULL
    right_rank = world.rank + 1 if world.rank < world.size - 1 else MPI.PROC_NULL
    world.Sendrecv(u[:1].copy(), left_rank, recvbuf=right_point, source=right_rank)
    world.Sendrecv(u[-1:].copy(), right_rank, recvbuf=left_point, source=left_rank)
    return float(left_point[0]), float(right_point[0])


def main() -> int:
    """Run the program on this rank. Return its exit code: 0 if the check passed, 1 if not, 2 for invalid options."""
    world = MPI.COMM_WORLD
    options = program.create_parser(__doc__)
    options.add_argument("--points", type=int, default=2000)
    options.add_argument("--steps", type=int, default=800)
    options.add_argument("--tolerance", type=float, default=1e-3, help="largest error that passes")
    arguments = program.parse_options(options, world)
    if arguments.points < world.size or arguments.steps < 1:
        if world.rank == 0:
            print(f"--points must be at least {world.size}, a point for each rank, and --steps 1", file=sys.stderr)
        return 2
    started = time.perf_counter()
    first, last = program.rank_range(arguments.points, world.rank, world.size)
    spacing = 1.0 / (arguments.points + 1)
    courant = 0.9
    delta = courant * spacing
    x = np.arange(first + 1, last + 1) * spacing
    previous, now = closed_form(x, 0.0), closed_form(x, delta)
    for _ in range(arguments.steps - 1):
        previous, now = now, next_points(now, previous, *exchange_points(world, now), courant)
    error = world.allreduce(float(np.abs(now - closed_form(x, arguments.steps * delta)).max()), op=MPI.MAX)
    took = time.perf_counter() - started
    result = f"wave: {arguments.points} points, {arguments.steps} steps, {world.size} ranks, {took:.2f} s"
    check = f"max error {error:.1e} <= {arguments.tolerance:.1e} against the closed form"
    return program.print_report(world, result, check, error <= arguments.tolerance, arguments.where)


if __name__ == "__main__":
    sys.exit(main())
