"""Latency (64 KB) and bandwidth (1 MB) between rank 0 and each other rank, both ways, as measured in sonmez-2010 V-A.

A message is answered with an empty one, so that each way is timed by itself: from what there and back took, half of
what an empty message takes there and back is taken off.
"""

import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from mpi4py import MPI

from koalapy.apps import report

LATENCY_BYTES = 64 * 1024
BANDWIDTH_BYTES = 1024 * 1024
BUDGET = 0.25
"""Seconds for all messages of one size and way, beside the first of each turn."""
TURNS = 3
"""The sizes take turns, so that what disturbs a while does not disturb all messages of a size."""
DATA, END = 1, 2


@dataclass(frozen=True, slots=True)
class OneWay:
    """What was measured from one rank to another: seconds for 64 KB, and bytes per second with 1 MB."""

    latency: float
    bandwidth: float
    repeats: int
    """How many messages of 1 MB were sent."""


def message(size: int, partner: int) -> bytes:
    """``size`` bytes that only this pair sends."""
    pattern = bytes((i * 31 + partner) % 251 for i in range(251))
    return (pattern * (size // len(pattern) + 1))[:size]


def turn(once: Callable[[], float], most: int, budget: float) -> list[float]:
    """Seconds of each round after the first, one at least; only the first where that took ``TURNS`` budgets."""
    first = once()
    if first >= TURNS * budget:
        return [first]
    found: list[float] = []
    started = time.perf_counter()
    while not found or (len(found) < most and time.perf_counter() - started < budget):
        found.append(once())
    return found


def sampled(exchange: Callable[[int], float], most: int, budget: float) -> dict[int, list[float]]:
    """Seconds of there and back by size, of ``most`` messages each; of a size that takes too long only one."""
    found: dict[int, list[float]] = {size: [] for size in (0, LATENCY_BYTES, BANDWIDTH_BYTES)}
    turns = min(TURNS, most)
    for _ in range(turns):
        for size, seconds in found.items():
            if not seconds or seconds[0] < budget:
                seconds += turn(partial(exchange, size), most // turns, budget / TURNS)
    return found


def undisturbed(seconds: list[float]) -> float:
    """The lower quartile: a rank that has to wait for its core tells nothing of the network."""
    return sorted(seconds)[len(seconds) // 4]


def send(world: MPI.Intracomm, partner: int, mark: int, most: int, budget: float) -> OneWay:
    """Time the way from here to ``partner``, which answers every message with an empty one."""
    data, empty = message(BANDWIDTH_BYTES, mark), bytearray()

    def exchange(size: int) -> float:
        sent = memoryview(data)[:size]
        started = time.perf_counter()
        world.Send(sent, partner, DATA)
        world.Recv(empty, partner, DATA)
        return time.perf_counter() - started

    samples = sampled(exchange, most, budget)
    found = {size: undisturbed(seconds) for size, seconds in samples.items()}
    world.Send(empty, partner, END)
    # An empty answer is never slower than the message, whatever the clock made of it.
    latency, one_way = (max(found[s] - found[0] / 2, found[s] / 2) for s in (LATENCY_BYTES, BANDWIDTH_BYTES))
    return OneWay(latency, BANDWIDTH_BYTES / one_way, len(samples[BANDWIDTH_BYTES]))


def answer(world: MPI.Intracomm, partner: int, mark: int) -> bool:
    """Answer until the partner has measured; whether messages came as they were sent."""
    buffer, empty, status = bytearray(BANDWIDTH_BYTES), bytearray(), MPI.Status()
    expected = message(BANDWIDTH_BYTES, mark)
    right: dict[int, bool] = {}
    while True:
        world.Recv(buffer, partner, MPI.ANY_TAG, status)
        if status.Get_tag() == END:
            return all(right.values())
        size = status.Get_count(MPI.BYTE)
        world.Send(empty, partner, DATA)
        if size not in right:  # the first of each size, which is not timed
            right[size] = buffer[:size] == expected[:size]


def measure(world: MPI.Intracomm, partner: int, given: Namespace) -> tuple[list[OneWay], bool]:
    """Both ways between rank 0 and ``partner``, told on rank 0; on both of them whether all came as it was sent."""
    most, budget = given.repeats, given.budget
    if world.rank == 0:
        there = send(world, partner, partner, most, budget)
        right = answer(world, partner, partner)
        return [there, world.recv(source=partner)], right
    right = answer(world, 0, partner)
    world.send(send(world, 0, partner, most, budget), 0)
    return [], right


def as_json(pairs: dict[int, list[OneWay]], repeats: int, passed: bool) -> str:
    """One line; latencies in seconds, bandwidths in bytes per second."""
    found = [
        {
            "ranks": [0, partner],
            "latency": mean_latency(ways),
            "bandwidth": mean_bandwidth(ways),
            "ways": [
                {"from": at, "to": to, **asdict(way)}
                for (at, to), way in zip(((0, partner), (partner, 0)), ways, strict=True)
            ],
        }
        for partner, ways in pairs.items()
    ]
    network = os.environ.get("OMPI_MCA_btl_tcp_if_include", "")  # noqa: SIM112
    sizes = {"latency_bytes": LATENCY_BYTES, "bandwidth_bytes": BANDWIDTH_BYTES, "repeats": repeats}
    return json.dumps({"program": "pingpong", **sizes, "network": network, "passed": passed, "pairs": found})


def mean_latency(ways: list[OneWay]) -> float:
    return statistics.fmean(way.latency for way in ways)


def mean_bandwidth(ways: list[OneWay]) -> float:
    """Of messages that go as often there as back."""
    return statistics.harmonic_mean([way.bandwidth for way in ways])


def main() -> int:
    world = MPI.COMM_WORLD
    options = report.parser(__doc__)
    options.add_argument("--repeats", type=int, default=300, help="messages of each size and way at most")
    options.add_argument("--budget", type=float, default=BUDGET, help="seconds for each size and way")
    options.add_argument("--json", action="store_true", help="tell the result in one line of JSON, and nothing else")
    given = report.parse(options, world)
    if world.size < 2 or given.repeats < 1 or not given.budget > 0:
        if world.rank == 0:
            said = f"not {world.size}, --repeats of at least 1, and a --budget above 0"
            print(f"pingpong needs 2 ranks or more, {said}", file=sys.stderr)
        return 2
    pairs: dict[int, list[OneWay]] = {}
    right = True
    for partner in range(1, world.size):
        world.Barrier()
        if world.rank in (0, partner):
            ways, fine = measure(world, partner, given)
            right = right and fine
            pairs |= {partner: ways} if ways else {}
    right = bool(world.allreduce(right, MPI.LAND))
    if given.json:
        if world.rank == 0:
            print(as_json(pairs, given.repeats, right), flush=True)
        return 0 if right else 1
    lines = [
        f"0 - {partner}: {1e3 * mean_latency(ways):.3f} ms for 64 KB, {mean_bandwidth(ways) / 1e6:.0f} MB/s with 1 MB"
        for partner, ways in pairs.items()
    ]
    result = "\n".join([f"pingpong: {world.size} ranks, up to {given.repeats} repeats", *lines])
    return report.finish(world, result, "every message came as it was sent", right, given.where)


if __name__ == "__main__":
    sys.exit(main())
