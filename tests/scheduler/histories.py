"""Long random histories of the state machine: ``python -m tests.scheduler.histories --steps 100000``.

Hypothesis plays short ones, and shrinks what fails. These go on for thousands of steps, so that whatever piles up is
found; one that fails is shortened by leaving out steps, and printed.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from random import Random
from typing import Any

from hypothesis.control import BuildContext
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.stateful import Rule

from tests.scheduler.test_machine import Grid

SHORTENING = 600.0
"""Seconds at most for making a history shorter."""


@dataclass(frozen=True, slots=True)
class Step:
    """A rule of the machine, and what it was given."""

    rule: Rule
    given: dict[str, Any]

    def __str__(self) -> str:
        given = ", ".join(f"{name}={_told(value)}" for name, value in self.given.items())
        return f"{self.rule.function.__name__}({given})"

    def is_possible(self, grid: Grid) -> bool:
        return all(holds(grid) for holds in self.rule.preconditions)

    def play(self, grid: Grid) -> None:
        self.rule.function(grid, **self.given)
        for invariant in grid.setup_state().invariants:
            invariant.function(grid)


def _told(value: object) -> str:
    """In few words: of what has fields, those that are not as they are by default."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_told(each) for each in value)}]"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    said = [
        (each.name, getattr(value, each.name)) for each in fields(value) if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(f'{name}={_told(each)}' for name, each in said)})"


def random_step(rule: Rule, random: Random) -> Step:
    data = ConjectureData(random=random)
    with BuildContext(data, wrapped_test=Grid):
        return Step(rule, {name: data.draw(strategy) for name, strategy in rule.arguments_strategies.items()})


def history(seed: int, length: int) -> Iterator[Step]:
    """The steps of one history, whether or not they are possible when their turn comes."""
    random, state = Random(seed), Grid.setup_state()
    yield random_step(state.initializers[0], random)
    for _ in range(length):
        yield random_step(random.choice(state.rules), random)


def play(steps: Sequence[Step] | Iterator[Step], played: list[Step] | None = None) -> int:
    """How many of the steps were possible; they are noted in ``played`` before they are played."""
    grid, count = Grid(), 0
    for step in steps:
        if step.is_possible(grid):
            if played is not None:
                played.append(step)
            step.play(grid)
            count += 1
    grid.teardown()
    return count


def fails(steps: Sequence[Step]) -> bool:
    try:
        play(steps)
    except Exception:  # noqa: BLE001
        return True
    return False


def shortened(steps: list[Step]) -> list[Step]:
    """As few of the steps as still fail, as far as can be found out in time."""
    until, size = time.monotonic() + SHORTENING, max(1, len(steps) // 2)
    while time.monotonic() < until:
        before = len(steps)
        start = len(steps) - size
        while start + size > 1 and time.monotonic() < until:
            less = steps[: max(1, start)] + steps[start + size :]
            if fails(less):
                steps = less
            start -= size
        if size == 1 and len(steps) == before:
            break
        size = max(1, size // 2)
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="in all histories together")
    parser.add_argument("--length", type=int, default=1000, help="steps of a history")
    parser.add_argument("--seed", type=int, help="of the first history; each has the next; others each time by default")
    arguments = parser.parse_args()
    first = int(time.time()) if arguments.seed is None else arguments.seed
    done, seed = 0, first
    while done < arguments.steps:
        played: list[Step] = []
        try:
            done += play(history(seed, arguments.length), played)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            print(f"history {seed} fails after {len(played)} steps; in short:", file=sys.stderr)
            print("\n".join(f"  {step}" for step in shortened(played)), file=sys.stderr)
            return 1
        seed += 1
        if (seed - first) % 10 == 0:
            print(f"{done} steps, up to seed {seed}", flush=True)
    print(f"{done} steps in {seed - first} histories, in which all laws held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
