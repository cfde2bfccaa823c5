"""Run fuzzers for a number of examples or a time, and count the results.

In ``make test`` each fuzzer runs the same few examples. In ``make fuzz`` each runs new examples for its share of the
time, from a seed that is printed, also with each failure.
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

DURATION_S = float(os.environ.get("KOALA_FUZZ_SECONDS", "0"))
"""Duration of each fuzzer; 0 runs a fixed number of examples."""
SEED = int(os.environ.get("KOALA_FUZZ_SEED") or time.time())
"""The seed of the first examples of a timed run."""
SHRINK = bool(os.environ.get("KOALA_FUZZ_SHRINK"))
"""Whether to shrink failing examples, which takes minutes."""
MAX_NOTE_LENGTH = 20_000
"""Characters of a failing example that are printed."""
EXAMPLES_PER_SEED = 50
"""Examples that are run with one seed."""


@dataclass
class Figures:
    """Counts of a fuzzer."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    findings: int = 0

    def __str__(self) -> str:
        counts = ", ".join(f"{number:,} {name}" for name, number in self.counts.items())
        return f"{self.name}: {counts} in {self.seconds:.0f} s; {self.findings} findings"


Attacked = Callable[[Path, list[Any], Figures], Coroutine[Any, Any, None]]


class AttackRunner:
    """Runs attacks one after another in one event loop, each in a separate folder."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._numbers = directory, count(1)
        self._runner = asyncio.Runner()

    def bind(self, attacked: Attacked) -> Callable[[list[Any], Figures], None]:
        """Return an attack as a function for ``run_campaign``."""
        return lambda attack, figures: self._runner.run(
            attacked(self._directory / f"{next(self._numbers)}", attack, figures)
        )

    def close(self) -> None:
        self._runner.close()


ALL_FIGURES: list[Figures] = []
"""The counts of all fuzzers of this process."""


def run_campaign(
    name: str, examples: int, strategy: SearchStrategy[Any], body: Callable[[Any, Figures], None]
) -> Figures:
    """Run ``body`` with ``examples`` examples, or for the duration of a timed run, and return its counts."""
    figures = Figures(name)
    ALL_FIGURES.append(figures)
    began = time.monotonic()
    try:
        if not DURATION_S:
            _run_examples(strategy, body, figures, examples, None)
        number = SEED
        while time.monotonic() - began < DURATION_S:
            _run_examples(strategy, body, figures, EXAMPLES_PER_SEED, number)
            number += 1
    except BaseException:
        figures.findings += 1
        raise
    finally:
        figures.seconds = time.monotonic() - began
    return figures


def repeat_command(seed: int) -> str:
    """Return the command that repeats the examples of a seed in the current test."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    return f"KOALA_FUZZ_SEED={seed} KOALA_FUZZ_SECONDS=1 python -m pytest --timeout 0 {test}"


def _run_examples(
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
            error.add_note(f"played: {str(drawn)[:MAX_NOTE_LENGTH]}")
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
            warnings.simplefilter("ignore", HypothesisWarning)  # about large examples
            played()
    except BaseException as error:
        if seed is not None:
            error.add_note(f"repeat with: {repeat_command(seed)}")
        raise
