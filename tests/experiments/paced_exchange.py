"""Compute and exchange data in turns, as an MPI program with one rank per node.

The source is passed to the nodes as text, so it imports nothing of koalapy.

In each step a rank sleeps for the compute time, because the nodes of a testbed share their processors. Then it sends
equal parts to all ranks, paced to BANDWIDTH bytes per second if the network allows it. At the end the program prints a
line of JSON with the seconds of all steps, with and without the compute time, of the slowest rank.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI

PIECES = 10
"""Number of parts of an exchange; after each one a rank waits to keep the pace."""


def main(steps: int, computing: float, communicating: float, bandwidth: float) -> None:
    world = MPI.COMM_WORLD
    part = max(1, int(bandwidth * communicating / PIECES / (world.size - 1)))
    sent, received = np.zeros((world.size, part), np.uint8), np.empty((world.size, part), np.uint8)
    world.Alltoall(sent, received)  # opens the connections
    spent = 0.0
    world.Barrier()
    began = time.monotonic()
    for _ in range(steps):
        time.sleep(computing)
        world.Barrier()
        exchange = time.monotonic()
        for piece in range(1, PIECES + 1):
            world.Alltoall(sent, received)
            time.sleep(max(0.0, exchange + piece * communicating / PIECES - time.monotonic()))
        world.Barrier()
        spent += time.monotonic() - exchange
    lasted = time.monotonic() - began
    slowest = world.reduce((lasted, spent), op=MPI.MAX)
    if slowest is not None:
        print(json.dumps({"lasted": slowest[0], "exchanging": slowest[1]}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *(float(each) for each in sys.argv[2:]))
