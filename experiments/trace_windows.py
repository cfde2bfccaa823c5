"""Cut windows from traces and machines into clusters, as repetitions of experiments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from random import Random

from experiments.traces import Traces
from koalapy.workload import swf

MACHINES = (
    "NASA-iPSC-1993-3.1-cln",
    "KTH-SP2-1996-2.1-cln",
    "CTC-SP2-1996-3.1-cln",
    "SDSC-SP2-1998-4.2-cln",
    "SDSC-BLUE-2000-4.2-cln",
    "HPC2N-2002-2.2-cln",
    "LLNL-Atlas-2006-2.1-cln",
    "LLNL-Thunder-2007-1.1-cln",
)
DAS_3 = (85, 41, 46, 32)
"""Nodes of the clusters of sonmez-2010; a machine is cut in these proportions."""


@dataclass(frozen=True, slots=True)
class WindowJob:
    """A job of a window; times in seconds, ``at`` from the begin of the window."""

    arrives_at: float
    nodes: int
    ran: float
    user: int
    requested: float = -1.0
    """The user's own estimate of the run time; -1 if unknown."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive jobs of a machine with ``nodes`` nodes."""

    jobs: tuple[WindowJob, ...]
    nodes: int

    @property
    def lasts(self) -> float:
        """Return the time until the last job arrives."""
        return self.jobs[-1].arrives_at


def shorten_name(trace: str) -> str:
    """Shorten the name of a trace: ``KTH-SP2`` for ``KTH-SP2-1996-2.1-cln``."""
    return "-".join(trace.split("-")[:2])


def draw_window(traces: Traces, name: str, seed: int, jobs: int) -> Window:
    """Return a window of ``jobs`` jobs at a random position that depends on the seed."""
    usable, nodes = _read_usable(traces, name)
    first = Random(f"{name}/{seed}").randrange(max(1, len(usable) - jobs + 1))
    selected = usable[first : first + jobs]
    began = selected[0].arrives_at
    return Window(tuple(replace(job, arrives_at=job.arrives_at - began) for job in selected), nodes)


@lru_cache(maxsize=2)
def _read_usable(traces: Traces, name: str) -> tuple[Sequence[WindowJob], int]:
    """Return the jobs with known run time and size, and the nodes of the machine. Convert processors to nodes."""
    trace = traces.read(name)
    nodes = _first_number(trace.header.get("MaxNodes", "")) or trace.processors
    per_node = max(1.0, trace.processors / nodes)
    jobs = swf.select_jobs(trace.jobs).usable
    return [WindowJob(j.submitted, ceil(j.processors / per_node), j.ran, j.user, j.requested_time) for j in jobs], nodes


def _first_number(text: str) -> int:
    number = text.split(" ")[0]
    return int(number) if number.isdecimal() else 0


def cut_machine(nodes: int, parts: Sequence[int] = DAS_3) -> dict[str, int]:
    """Cut a machine into clusters in these proportions. Each has at least one node; the first gets the remainder."""
    total = sum(parts)
    sizes = [max(1, nodes * part // total) for part in parts]
    sizes[0] += max(0, nodes - sum(sizes))
    return {f"cluster-{number}": size for number, size in enumerate(sizes, 1)}
