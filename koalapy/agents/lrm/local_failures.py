"""Starts that fail on purpose, so that fault tolerance can be tried out on an embedded cluster."""

import random
from collections.abc import Sequence
from pathlib import Path

FILE = "start-failures"
"""In the cluster's directory: a probability from 0 to 1 that counts instead of the configured one while it is there."""
_FAIL = ("/bin/sh", "-c", "echo 'koala: this start fails on purpose (start_failures)' >&2; exit 1")


class StartFailures:
    """Draws, for each start, whether it fails; the same draws in each life of an agent of the same cluster."""

    def __init__(self, directory: Path, cluster: str, probability: float) -> None:
        self._path = directory / FILE
        self._default = probability
        self._draws = random.Random(cluster)

    @property
    def probability(self) -> float:
        """As the file says, if there is one with a number in it, else as configured."""
        try:
            return float(self._path.read_text())
        except (OSError, ValueError):
            return self._default

    def command(self, argv: Sequence[str]) -> list[str]:
        """What is to be run in place of a runner: it, or something that takes its nodes and fails at once."""
        return list(_FAIL if self._draws.random() < self.probability else argv)
