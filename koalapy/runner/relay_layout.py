"""Assign a range of ports to each node of a job with relayed links. Daemon and runners compute the same layout.

Every node's relay listens on loopback at the ports of the other nodes. So a port belongs to one node of the job.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_PORT, LAST_PORT = 15_000, 32_767
"""The ports of all layouts, below those that Linux gives to connections."""
RELAY_CONTROL_PORTS = 8
"""Ports of each node at which mpirun listens for its daemons, if it runs there: two for each program at a time."""
SPARE_PORTS = 4
"""Ports of each node beside one for each rank: for the probe, and for ports that other programs use."""


def count_ports(slots: Sequence[int]) -> int:
    """Return how many ports a job needs; ``slots``: the ranks of each node."""
    return sum(slots) + len(slots) * (RELAY_CONTROL_PORTS + SPARE_PORTS)


def node_ports(base: int, slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last port of each node, from the port ``base`` on. ``slots``: the ranks of each node."""
    ranges = []
    for count in slots:
        width = count + RELAY_CONTROL_PORTS + SPARE_PORTS
        ranges.append((base, base + width - 1))
        base += width
    return ranges


def split_ports(ports: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two parts of a node's range: the ports of mpirun, and those of ranks and the probe."""
    first, last = ports
    return (first, first + RELAY_CONTROL_PORTS - 1), (first + RELAY_CONTROL_PORTS, last)
