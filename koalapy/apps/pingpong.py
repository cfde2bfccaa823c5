"""Latency (64 KB) and bandwidth (1 MB) between rank 0 and each other rank, as measured in sonmez-2010 V-A."""

import sys
import time

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from koalapy.apps import report

LATENCY_BYTES = 64 * 1024
BANDWIDTH_BYTES = 1024 * 1024


def message(size: int, partner: int) -> NDArray[np.uint8]:
    """``size`` bytes that only this pair sends."""
    return ((np.arange(size) * 31 + partner) % 251).astype(np.uint8)


def ping(world: MPI.Intracomm, partner: int, size: int, repeats: int) -> tuple[float, bool]:
    """One way in seconds, the mean over there and back; and whether what came back was what was sent."""
    sent, back = message(size, partner), np.zeros(size, dtype=np.uint8)
    started = time.perf_counter()
    for _ in range(repeats):
        world.Send(sent, partner)
        world.Recv(back, partner)
    return (time.perf_counter() - started) / (2 * repeats), bool(np.array_equal(sent, back))


def pong(world: MPI.Intracomm, size: int, repeats: int) -> None:
    buffer = np.zeros(size, dtype=np.uint8)
    for _ in range(repeats):
        world.Recv(buffer, 0)
        world.Send(buffer, 0)


def main() -> int:
    world = MPI.COMM_WORLD
    options = report.parser(__doc__)
    options.add_argument("--repeats", type=int, default=20)
    given = report.parse(options, world)
    if world.size < 2 or given.repeats < 1:
        if world.rank == 0:
            print(f"pingpong needs 2 ranks or more, not {world.size}, and --repeats of at least 1", file=sys.stderr)
        return 2
    lines: list[str] = []
    right = True
    for partner in range(1, world.size):
        world.Barrier()
        if world.rank == 0:
            latency, fine = ping(world, partner, LATENCY_BYTES, given.repeats)
            one_way, also = ping(world, partner, BANDWIDTH_BYTES, given.repeats)
            right = right and fine and also
            rate = BANDWIDTH_BYTES / one_way / 1e6
            lines.append(f"0 - {partner}: {1e3 * latency:.3f} ms for 64 KB, {rate:.0f} MB/s with 1 MB")
        elif world.rank == partner:
            pong(world, LATENCY_BYTES, given.repeats)
            pong(world, BANDWIDTH_BYTES, given.repeats)
    result = "\n".join([f"pingpong: {world.size} ranks, {given.repeats} repeats", *lines])
    return report.finish(world, result, "every message came back as it was sent", right, given.where)


if __name__ == "__main__":
    sys.exit(main())
