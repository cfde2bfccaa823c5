"""An MPI program that computes and exchanges in turn, one rank a node. It is sent to the nodes as it is, and so imports
nothing of koalapy.

In each step a rank computes for so many seconds (it sleeps: nodes of a testbed share their processors), and then sends
equal parts to all others, paced so that it sends BANDWIDTH bytes per second if the network takes as much. Ends with a
line of JSON: the steps' seconds, with and without the computing, of the slowest rank.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI

PIECES = 10
"""In which an exchange goes on its way: between them a rank waits until it would have sent so much."""


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
