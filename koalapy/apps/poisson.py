"""Solves the two-dimensional Poisson equation by conjugate gradients, rows shared among the ranks.

On the unit square with u = 0 on its border and the solution u = x·(1 - x)·eˣ·y·(1 - y)·eʸ.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from koalapy.apps import program

Grid = NDArray[np.float64]


def analytic_solution(x: Grid, y: Grid) -> Grid:
    """Return the analytic solution at the points (x, y)."""
    return np.asarray(_bump(x) * _bump(y))


def source_term(x: Grid, y: Grid) -> Grid:
    """Return -Δ of the solution."""
    return np.asarray(_minus_bend(x) * _bump(y) + _bump(x) * _minus_bend(y))


def _bump(x: Grid) -> Grid:
    return np.asarray(x * (1 - x) * np.exp(x))


def _minus_bend(x: Grid) -> Grid:
    """Return -f'' of the bump f(x) = x·(1 - x)·eˣ."""
    return np.asarray(x * (3 + x) * np.exp(x))


def minus_laplace(u: Grid, above: Grid, below: Grid, spacing: float) -> Grid:
    """Return -Δu by the five-point stencil; ``above`` and ``below`` are the rows of the neighbouring ranks."""
    padded = np.pad(np.vstack((above, u, below)), ((0, 0), (1, 1)))
    middle = padded[1:-1, 1:-1]
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return np.asarray((4.0 * middle - around) / spacing**2)


def conjugate_gradients(
    apply: Callable[[Grid], Grid],
    dot: Callable[[Grid, Grid], float],
    right: Grid,
    tolerance: float,
    max_iterations: int,
) -> tuple[Grid, int]:
    """Solve apply(u) = right until the residual has fallen by the factor ``tolerance``.

    Return the solution and the number of iterations, at most ``max_iterations``.
    """
    u = np.zeros_like(right)
    residual, direction = right.copy(), right.copy()
    size = first = dot(residual, residual)
    for iteration in range(max_iterations):
        if size <= tolerance**2 * first:
            return u, iteration
        image = apply(direction)
        step = size / dot(direction, image)
        u += step * direction
        residual -= step * image
        size, previous_size = dot(residual, residual), size
        direction = residual + (size / previous_size) * direction
    return u, max_iterations


def exchange_rows(world: MPI.Intracomm, u: Grid) -> tuple[Grid, Grid]:
    """Return the rows above and below this rank's rows; zeros at the border of the grid."""
    above, below = np.zeros(u.shape[1]), np.zeros(u.shape[1])
    up = world.rank - 1 if world.rank > 0 else MPI.PROC_NULL
    down = world.rank + 1 if world.rank < world.size - 1 else MPI.PROC_NULL
    world.Sendrecv(np.ascontiguousarray(u[0]), up, recvbuf=below, source=down)
    world.Sendrecv(np.ascontiguousarray(u[-1]), down, recvbuf=above, source=up)
    return above, below


def main() -> int:
    """Run the program on this rank. Return its exit code: 0 if the check passed, 1 if not, 2 for invalid options."""
    world = MPI.COMM_WORLD
    options = program.create_parser(__doc__)
    options.add_argument("--grid", type=int, default=160, help="inner points in each direction")
    options.add_argument("--iterations", type=int, default=500, help="at most")
    options.add_argument("--tolerance", type=float, default=1e-3, help="largest error that passes")
    arguments = program.parse_options(options, world)
    if arguments.grid < world.size:
        if world.rank == 0:
            print(f"--grid is {arguments.grid}, but each of the {world.size} ranks needs a row", file=sys.stderr)
        return 2
    started = time.perf_counter()
    first, last = program.rank_range(arguments.grid, world.rank, world.size)
    spacing = 1.0 / (arguments.grid + 1)
    points = np.arange(1, arguments.grid + 1) * spacing
    x, y = np.meshgrid(points, points[first:last])

    def apply(u: Grid) -> Grid:
        return minus_laplace(u, *exchange_rows(world, u), spacing)

    def dot(a: Grid, b: Grid) -> float:
        return float(world.allreduce(float(np.vdot(a, b)), op=MPI.SUM))

    u, iterations = conjugate_gradients(apply, dot, source_term(x, y), 1e-6, arguments.iterations)
    error = world.allreduce(float(np.abs(u - analytic_solution(x, y)).max()), op=MPI.MAX)
    took = time.perf_counter() - started
    size = f"{arguments.grid} x {arguments.grid} points"
    result = f"poisson: {size}, {world.size} ranks, {iterations} iterations, {took:.2f} s"
    check = f"max error {error:.1e} <= {arguments.tolerance:.1e} against the analytic solution"
    return program.print_report(world, result, check, error <= arguments.tolerance, arguments.where)


if __name__ == "__main__":
    sys.exit(main())
