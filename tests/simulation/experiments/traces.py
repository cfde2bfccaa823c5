"""Small traces for tests, in the Standard Workload Format."""

import lzma
from collections.abc import Sequence
from pathlib import Path

from koalapy.simulation.experiments.traces import Traces


def swf_line(
    number: int,
    *,
    submitted: float = 0,
    ran: float = 60,
    processors: int = 1,
    status: int = 1,
    requested: float = -1,
    queue: int = 1,
) -> str:
    return (
        f"{number} {submitted} -1 {ran} {processors} -1 -1 {processors} {requested} -1 {status} 1 1 1 {queue} 1 -1 -1"
    )


def a_trace(folder: Path, name: str, lines: Sequence[str]) -> Traces:
    with lzma.open(folder / f"{name}.swf.xz", "wt") as file:
        file.write("; MaxProcs: 128\n" + "\n".join(lines) + "\n")
    return Traces(folder)
