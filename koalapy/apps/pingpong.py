"""Latency (64 KB) and bandwidth (1 MB) between rank 0 and each other rank, both ways, as measured in sonmez-2010 V-A.

Both ways are measured in turn. Each message is answered with an empty one: the time of the way is that of message and
answer, less half of the round trip of an empty message.
"""

import json
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from mpi4py import MPI

from koalapy.apps import program

LATENCY_BYTES = 64 * 1024
BANDWIDTH_BYTES = 1024 * 1024
BUDGET = 0.5
"""Seconds for all messages of one size in both directions, without the first message of each turn."""
TURNS = 3
"""Number of turns of each size. The sizes alternate, so that a disturbance does not affect all messages of one size."""
DATA, END = 1, 2

Round = tuple[float, float]
"""Seconds of a message and its answer in each direction: from rank 0 to the partner, and back."""


@dataclass(frozen=True, slots=True)
class OneWay:
    """Measurements in one direction: latency in seconds for 64 KB, bandwidth in bytes per second with 1 MB."""

    latency: float
    bandwidth: float
    repeats: int
    """Number of messages of 1 MB."""


def make_message(size: int, partner: int) -> bytes:
    """Return ``size`` bytes that are specific to a pair of ranks."""
    pattern = bytes((i * 31 + partner) % 251 for i in range(251))
    return (pattern * (size // len(pattern) + 1))[:size]


def run_turn(once: Callable[[], Round], max_rounds: int, budget: float) -> list[Round]:
    """Exchange messages up to ``max_rounds`` times within ``budget`` seconds; return the durations of each exchange.

    Omit the first exchange, a warm-up, unless it was so slow that it remains the only one.
    """
    first = once()
    if sum(first) >= TURNS * budget:
        return [first]
    rounds: list[Round] = []
    started = time.perf_counter()
    while not rounds or (len(rounds) < max_rounds and time.perf_counter() - started < budget):
        rounds.append(once())
    return rounds


def sample_rounds(exchange: Callable[[int], Round], max_rounds: int, budget: float) -> dict[int, list[Round]]:
    """Exchange messages of each size; return the durations of each exchange, by size.

    About ``max_rounds`` exchanges for each size within ``budget`` seconds; a size that takes too long gets one.
    """
    rounds_by_size: dict[int, list[Round]] = {size: [] for size in (0, LATENCY_BYTES, BANDWIDTH_BYTES)}
    turns = min(TURNS, max_rounds)
    for _ in range(turns):
        for size, rounds in rounds_by_size.items():
            if not rounds or sum(rounds[0]) < budget:
                rounds += run_turn(partial(exchange, size), max_rounds // turns, budget / TURNS)
    return rounds_by_size


def one_way(seconds: Mapping[int, Sequence[float]]) -> OneWay:
    """Return the latency and bandwidth in one direction from the seconds of its messages by size."""
    durations = {size: _lower_quartile(samples) for size, samples in seconds.items()}
    # An empty answer is never slower than the message; clock errors may suggest otherwise.
    latency, longer = (max(durations[s] - durations[0] / 2, durations[s] / 2) for s in (LATENCY_BYTES, BANDWIDTH_BYTES))
    return OneWay(latency, BANDWIDTH_BYTES / longer, len(seconds[BANDWIDTH_BYTES]))


def _lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile: a delay by a rank that waits for its core does not reflect the network."""
    return sorted(seconds)[len(seconds) // 4]


class Side:
    """One of the two ranks that exchange messages."""

    def __init__(self, world: MPI.Intracomm, partner: int, mark: int) -> None:
        self._world, self._partner = world, partner
        self._data, self._buffer, self._empty = (
            make_message(BANDWIDTH_BYTES, mark),
            bytearray(BANDWIDTH_BYTES),
            bytearray(),
        )
        self._seen: dict[int, bool] = {}

    def measure_directions(self, max_rounds: int, budget: float) -> tuple[list[OneWay], bool]:
        """Measure both directions; return the results, and whether messages arrived unchanged."""
        rounds = sample_rounds(self._exchange_round, max_rounds, budget)
        self._world.Send(self._empty, self._partner, END)
        directions = [
            one_way({size: [pair[direction] for pair in pairs] for size, pairs in rounds.items()})
            for direction in (0, 1)
        ]
        return directions, all(self._seen.values())

    def answer_messages(self) -> bool:
        """Answer and return messages until the other rank has measured; return whether they arrived unchanged."""
        while (size := self._answer_message()) is not None:
            back = self._time_message(size)
            self._world.Send(array("d", [back]), self._partner, DATA)
        return all(self._seen.values())

    def _exchange_round(self, size: int) -> Round:
        """Send a message and receive one of the same size; return the seconds of each direction."""
        forward, back = self._time_message(size), array("d", [0.0])
        self._answer_message()
        self._world.Recv(back, self._partner, DATA)
        return forward, back[0]

    def _time_message(self, size: int) -> float:
        """Return the seconds from sending a message to its answer."""
        sent = memoryview(self._data)[:size]
        started = time.perf_counter()
        self._world.Send(sent, self._partner, DATA)
        self._world.Recv(self._empty, self._partner, DATA)
        return time.perf_counter() - started

    def _answer_message(self) -> int | None:
        """Answer the next message and return its size in bytes; None if the other rank has ended the measurement."""
        status = MPI.Status()
        self._world.Recv(self._buffer, self._partner, MPI.ANY_TAG, status)
        if status.Get_tag() == END:
            return None
        size = int(status.Get_count(MPI.BYTE))
        self._world.Send(self._empty, self._partner, DATA)
        if size not in self._seen:  # Check only the first message of each size: the way back is not timed yet.
            self._seen[size] = self._buffer[:size] == self._data[:size]
        return size


def as_json(pairs: dict[int, list[OneWay]], repeats: int, passed: bool) -> str:
    """Return one line of JSON; latencies in seconds, bandwidths in bytes per second."""
    results = [
        {
            "ranks": [0, partner],
            "latency": mean_latency(ways),
            "bandwidth": mean_bandwidth(ways),
            "ways": [
                {"from": source, "to": target, **asdict(measured)}
                for (source, target), measured in zip(((0, partner), (partner, 0)), ways, strict=True)
            ],
        }
        for partner, ways in pairs.items()
    ]
    network = os.environ.get("OMPI_MCA_btl_tcp_if_include", "")  # noqa: SIM112
    sizes = {"latency_bytes": LATENCY_BYTES, "bandwidth_bytes": BANDWIDTH_BYTES, "repeats": repeats}
    return json.dumps({"program": "pingpong", **sizes, "network": network, "passed": passed, "pairs": results})


def mean_latency(directions: list[OneWay]) -> float:
    return statistics.fmean(direction.latency for direction in directions)


def mean_bandwidth(directions: list[OneWay]) -> float:
    """Return the mean bandwidth of messages that are sent equally often in each direction."""
    return statistics.harmonic_mean([direction.bandwidth for direction in directions])


def main() -> int:
    """Run the program on this rank. Return its exit code: 0 if the check passed, 1 if not, 2 for invalid options."""
    world = MPI.COMM_WORLD
    options = program.create_parser(__doc__)
    options.add_argument("--repeats", type=int, default=300, help="messages of each size and way at most")
    options.add_argument("--budget", type=float, default=BUDGET, help="seconds for each size")
    options.add_argument("--json", action="store_true", help="tell the result in one line of JSON, and nothing else")
    arguments = program.parse_options(options, world)
    if world.size < 2 or arguments.repeats < 1 or not arguments.budget > 0:
        if world.rank == 0:
            requirements = f"not {world.size}, --repeats of at least 1, and a --budget above 0"
            print(f"pingpong needs 2 ranks or more, {requirements}", file=sys.stderr)
        return 2
    pairs: dict[int, list[OneWay]] = {}
    right = True
    for partner in range(1, world.size):
        world.Barrier()
        if world.rank in (0, partner):
            side = Side(world, partner if world.rank == 0 else 0, partner)
            if world.rank == 0:
                pairs[partner], fine = side.measure_directions(arguments.repeats, arguments.budget)
            else:
                fine = side.answer_messages()
            right = right and fine
    right = bool(world.allreduce(right, MPI.LAND))
    if arguments.json:
        if world.rank == 0:
            print(as_json(pairs, arguments.repeats, right), flush=True)
        return 0 if right else 1
    lines = [
        f"0 - {partner}: {1e3 * mean_latency(ways):.3f} ms for 64 KB, {mean_bandwidth(ways) / 1e6:.0f} MB/s with 1 MB"
        for partner, ways in pairs.items()
    ]
    result = "\n".join([f"pingpong: {world.size} ranks, up to {arguments.repeats} repeats", *lines])
    return program.print_report(world, result, "every message came as it was sent", right, arguments.where)


if __name__ == "__main__":
    sys.exit(main())
