"""How long the fuzzers play, and what they have to tell of it.

By themselves, as in ``make test``, each plays some examples, always the same. For ``make fuzz`` each has its share of
the time and plays new ones until that is over, from a seed that is told; a failure is told with its seed, too.
"""

import asyncio
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import HypothesisWarning
from hypothesis.strategies import SearchStrategy

SECONDS = float(os.environ.get("KOALA_FUZZ_SECONDS", "0"))
"""How long each of the fuzzers plays; 0: some examples."""
SEED = int(os.environ.get("KOALA_FUZZ_SEED") or time.time())
"""Of the first round of those who play for a time."""
SHRINK = bool(os.environ.get("KOALA_FUZZ_SHRINK"))
"""Whether what was found is to be made as short as can be, which takes minutes."""
MAX_SHOWN = 20_000
"""Characters of what was played when something was found."""
ROUND = 50
"""Examples of one seed."""


@dataclass
class Figures:
    """What was played."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    findings: int = 0

    def __str__(self) -> str:
        counted = ", ".join(f"{number:,} {what}" for what, number in self.counts.items())
        return f"{self.name}: {counted} in {self.seconds:.0f} s; {self.findings} findings"


Attacked = Callable[[Path, list[Any], Figures], Coroutine[Any, Any, None]]


class Ground:
    """Where attacks are played one after the other, each in a folder of its own, in one event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._numbers = directory, count(1)
        self._runner = asyncio.Runner()

    def of(self, attacked: Attacked) -> Callable[[list[Any], Figures], None]:
        """What ``play`` is given."""
        return lambda attack, figures: self._runner.run(
            attacked(self._directory / f"{next(self._numbers)}", attack, figures)
        )

    def close(self) -> None:
        self._runner.close()


TOLD: list[Figures] = []
"""Of all fuzzers of this run."""


def play(name: str, examples: int, strategy: SearchStrategy[Any], body: Callable[[Any, Figures], None]) -> Figures:
    """Have ``body`` play ``examples`` examples, or as many as there is time for; it counts what it did."""
    figures = Figures(name)
    TOLD.append(figures)
    began = time.monotonic()
    try:
        if not SECONDS:
            _round(strategy, body, figures, examples, None)
        number = SEED
        while time.monotonic() - began < SECONDS:
            _round(strategy, body, figures, ROUND, number)
            number += 1
    except BaseException:
        figures.findings += 1
        raise
    finally:
        figures.seconds = time.monotonic() - began
    return figures


def repeat_command(seed: int) -> str:
    """Return the command that plays the round of a seed again, in the test that runs now."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    return f"KOALA_FUZZ_SEED={seed} KOALA_FUZZ_SECONDS=1 python -m pytest --timeout 0 {test}"


def _round(
    strategy: SearchStrategy[Any],
    body: Callable[[Any, Figures], None],
    figures: Figures,
    examples: int,
    seed: int | None,
) -> None:
    def example(drawn: Any) -> None:
        figures.counts["examples"] += 1
        try:
            body(drawn, figures)
        except BaseException as error:
            error.add_note(f"played: {str(drawn)[:MAX_SHOWN]}")
            raise

    played = hypothesis.given(strategy)(example)
    if seed is not None:
        played = hypothesis.seed(seed)(played)
    played = settings(
        max_examples=examples,
        deadline=None,
        derandomize=seed is None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
        print_blob=False,
    )(played)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HypothesisWarning)  # of what is long to be told
            played()
    except BaseException as error:
        if seed is not None:
            error.add_note(f"repeat with: {repeat_command(seed)}")
        raise
