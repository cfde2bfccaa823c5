"""Write small traces for tests in the Standard Workload Format."""

import lzma
from collections.abc import Sequence
from pathlib import Path

from experiments.traces import Traces


def swf_line(
    number: int,
    *,
    submitted: float = 0,
    ran: float = 60,
    processors: int = 1,
    status: int = 1,
    requested: float = -1,
    queue: int = 1,
    user: int = 1,
) -> str:
    ran_on = f"{submitted} -1 {ran} {processors} -1 -1"
    return f"{number} {ran_on} {processors} {requested} -1 {status} {user} 1 1 {queue} 1 -1 -1"


def a_trace(folder: Path, name: str, lines: Sequence[str], header: str = "; MaxProcs: 128\n") -> Traces:
    with lzma.open(folder / f"{name}.swf.xz", "wt") as file:
        file.write(header + "\n".join(lines) + "\n")
    return Traces(folder)
