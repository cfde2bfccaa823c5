"""Compare the figures of a benchmark with stored ones, and store them. Speeds are relative to the speed of the machine.

The file has the figures of the last run of ``make bench-core`` that was committed, each with the seconds that a fixed
loop of Python took in the same run.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from time import process_time

FILE = Path(__file__).with_name("core.json")
CALIBRATION_ROUNDS = 7
Numbers = dict[str, float]


class Point:
    """An object of the calibration."""

    __slots__ = ("x", "y")

    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y


def calibrate() -> float:
    """Return the CPU seconds of a fixed loop with calls, objects and dictionaries: the least of several rounds."""
    times = []
    for _ in range(CALIBRATION_ROUNDS):
        began, points = process_time(), dict[int, Point]()
        for number in range(100_000):
            point = points.get(number % 1000)
            points[number % 1000] = Point(number, 1) if point is None else Point(point.y, point.x + 1)
        times.append(process_time() - began)
    return min(times)


def flatten(figures: dict[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield each measured figure with its name, such as ``placements_per_s.auto``."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield prefix + name, float(value)


def gain(name: str, new: float, stored: float, machine: float) -> float:
    """Return by which factor a figure is better than the stored one; ``machine``: the speed-up of the calibration."""
    kind = name.partition(".")[0]
    if kind.startswith("bytes_") or kind.endswith("_mb"):
        return stored / new
    return new / stored / machine if kind.endswith("_per_s") else stored / new / machine


def compare_and_store(figures: dict[str, object], calibration_s: float, file: Path = FILE) -> list[str]:
    """Store the measured figures, and return a line for each: its ratio to the stored one, more than 1 if better."""
    stored: dict[str, Numbers] = json.loads(file.read_text()) if file.exists() else {}
    lines = []
    for name, value in flatten(figures):
        if (last := stored.get(name)) is not None and value and last["value"]:
            ratio = gain(name, value, last["value"], last["calibration_s"] / calibration_s)
            lines.append(f"  {name}: {ratio:.2f} of {last['value']:g}, better if more than 1")
        stored[name] = {"value": value, "calibration_s": float(f"{calibration_s:.4g}")}
    file.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    return lines
