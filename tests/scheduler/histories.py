"""Run long random histories of the state machine: ``python -m tests.scheduler.histories --steps 100000``.

Hypothesis runs short histories and shrinks failures. These histories have thousands of steps and so find state that
accumulates. A failing history is shortened by removing steps, then printed.
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

SHRINK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Step:
    """A rule of the state machine with its drawn arguments."""

    rule: Rule
    arguments: dict[str, Any]

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={_format_value(value)}" for name, value in self.arguments.items())
        return f"{self.rule.function.__name__}({arguments})"

    def is_possible(self, grid: Grid) -> bool:
        return all(holds(grid) for holds in self.rule.preconditions)

    def play(self, grid: Grid) -> None:
        self.rule.function(grid, **self.arguments)
        for invariant in grid.setup_state().invariants:
            invariant.function(grid)


def _format_value(value: object) -> str:
    """Return a short representation; of dataclasses, print only fields that differ from their default."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    changed_fields = [
        (item.name, getattr(value, item.name)) for item in fields(value) if getattr(value, item.name) != item.default
    ]
    return f"{type(value).__name__}({', '.join(f'{name}={_format_value(item)}' for name, item in changed_fields)})"


def random_step(rule: Rule, random: Random) -> Step:
    data = ConjectureData(random=random)
    with BuildContext(data, wrapped_test=Grid):
        return Step(rule, {name: data.draw(strategy) for name, strategy in rule.arguments_strategies.items()})


def generate_history(seed: int, length: int) -> Iterator[Step]:
    """Yield the random steps of one history. Some may be impossible in the state that they meet."""
    random, state = Random(seed), Grid.setup_state()
    yield random_step(state.initializers[0], random)
    for _ in range(length):
        yield random_step(random.choice(state.rules), random)


def play_history(steps: Sequence[Step] | Iterator[Step], possible_steps: list[Step] | None = None) -> int:
    """Run the possible steps and return their number. Append each to ``possible_steps`` before it runs."""
    grid, count = Grid(), 0
    for step in steps:
        if step.is_possible(grid):
            if possible_steps is not None:
                possible_steps.append(step)
            step.play(grid)
            count += 1
    grid.teardown()
    return count


def does_fail(steps: Sequence[Step]) -> bool:
    try:
        play_history(steps)
    except Exception:  # noqa: BLE001
        return True
    return False


def shrink_history(steps: list[Step]) -> list[Step]:
    """Return a shorter history that still fails, found by removing steps until the timeout."""
    deadline, size = time.monotonic() + SHRINK_TIMEOUT_S, max(1, len(steps) // 2)
    while time.monotonic() < deadline:
        count = len(steps)
        start = len(steps) - size
        while start + size > 1 and time.monotonic() < deadline:
            candidate = steps[: max(1, start)] + steps[start + size :]
            if does_fail(candidate):
                steps = candidate
            start -= size
        if size == 1 and len(steps) == count:
            break
        size = max(1, size // 2)
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="total number of steps")
    parser.add_argument("--length", type=int, default=1000, help="steps per history")
    parser.add_argument("--seed", type=int, help="seed of the first history, incremented for each; random by default")
    arguments = parser.parse_args()
    first = int(time.time()) if arguments.seed is None else arguments.seed
    step_count, seed = 0, first
    while step_count < arguments.steps:
        possible_steps: list[Step] = []
        try:
            step_count += play_history(generate_history(seed, arguments.length), possible_steps)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            print(f"history {seed} fails after {len(possible_steps)} steps; shortened:", file=sys.stderr)
            print("\n".join(f"  {step}" for step in shrink_history(possible_steps)), file=sys.stderr)
            return 1
        seed += 1
        if (seed - first) % 10 == 0:
            print(f"{step_count} steps, up to seed {seed}", flush=True)
    print(f"{step_count} steps in {seed - first} histories, all invariants held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
