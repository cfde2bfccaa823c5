"""Record days of a virtual grid, and write them as exported files."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from koalapy import __version__
from koalapy.model.request import Request
from koalapy.scheduler.rules import Rules
from koalapy.simulation.record.format import FORMAT, encode_line
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.simulation.record.recorded_world import Life, RecordedWorld

SIZES = {"north": 4, "south": 3, "west": 2}


def record_day(seed: int = 1, jobs: int = 30, **rules: Any) -> RecordedWorld:
    """Record jobs of all kinds, local users, failing nodes and a restart of the daemon."""
    draw, numbers = Random(seed), iter(range(10**6))
    world = RecordedWorld(SIZES, Rules(**rules), nonces=lambda: f"{next(numbers):x}")
    for count in range(jobs):
        kind = draw.choice(["flexible", "flexible", "nonfixed", "fixed"])
        request: Request = flexible(draw.randint(1, 7))
        if kind != "flexible":
            size = draw.randint(1, 2)
            request = nonfixed(draw.randint(1, 3), size) if kind == "nonfixed" else fixed(north=2 * size)
        world.submit(
            request, run_time=draw.choice([3.0, 20.0, 47.5]), environment=(("PASSWORD", "of-the-environment"),)
        )
        world.advance(draw.choice([0.0, 1.0, 9.0]))
        if draw.random() < 0.2:
            world.cancel(draw.choice(world.queries.jobs()).id) if world.queries.jobs() else None
        if count == jobs // 2:
            world.restart()
            for name in SIZES:
                world.connect(name)
    world.advance(600.0)
    return world


def export_lines(lives: Sequence[Life]) -> bytes:
    """Return daemon runs as ``koala export`` writes them."""
    lines = [encode_line({"koala_export": FORMAT, "version": __version__, "since": 0.0, "until": 1e10})]
    for number, (beginning, *steps) in enumerate(lives, 1):
        lines.append(encode_line({"koala_record": FORMAT, "version": __version__, "life": str(number), "part": 1}))
        lines += [encode_line({"begin": json.loads(beginning)}), *steps]
    return b"".join([*lines, encode_line({"end": True})])


def write_export(path: Path, lives: Sequence[Life]) -> Path:
    path.write_bytes(export_lines(lives))
    return path
