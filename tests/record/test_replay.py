"""Whatever happens to a scheduler, what was recorded of it does the same again."""

import json
from typing import cast

from hypothesis import Phase, settings

from koalapy.policies.registry import builtin
from koalapy.record.lines import beginning_from_json, step_from_json
from koalapy.record.replay import Divergence, Replay
from tests.record.recorded_world import Life, RecordedWorld
from tests.scheduler.machine.base import MANY
from tests.scheduler.test_machine import Grid


def divergence(life: Life) -> Divergence | None:
    """Where its replay did something else."""
    begun, *steps = map(json.loads, life)
    replay = Replay(beginning_from_json(begun), builtin())
    for step in steps:
        _, found = replay.take(step_from_json(step))
        if found is not None:
            return found
    return None


class RecordedGrid(Grid):
    """Anything that can happen, in any order; each life of the daemon is replayed by itself."""

    world_class = RecordedWorld

    def nothing_is_kept(self) -> None:
        """Steps are, by whoever records them."""

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            for life in cast(RecordedWorld, self.world).lives:
                assert divergence(life) is None


RecordedGrid.TestCase.settings = settings(
    max_examples=MANY or 30,
    stateful_step_count=60,
    deadline=None,
    derandomize=not MANY,
    database=None,
    phases=[Phase.generate],
)
TestRecordedGrid = RecordedGrid.TestCase
