"""Whatever happens to a scheduler, what was recorded of it does the same again."""

from collections.abc import Sequence
from itertools import count
from typing import Any, cast

import pytest
from hypothesis import Phase, settings

from koalapy.model.job import Job
from koalapy.model.limits import Limits
from koalapy.model.users import User
from koalapy.placement.registry import builtin
from koalapy.record.beginning import Beginning, KnownCluster, People
from koalapy.record.lines import beginning_from_json, beginning_to_json, line, step_from_json, step_to_json
from koalapy.record.recorded import RecordedScheduler
from koalapy.record.recorder import Recorder
from koalapy.record.replay import Replay
from koalapy.record.step import Step
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.scheduler import Scheduler
from tests.scheduling.machine.base import MANY
from tests.scheduling.test_machine import Grid
from tests.scheduling import world as worlds
import json


class RecordedWorld(worlds.World):
    def __init__(self, *given: Any, **named: Any) -> None:
        self.lives: list[tuple[bytes, list[bytes]]] = []
        super().__init__(*given, **named)

    def _scheduler(self, clusters: Sequence[ClusterStatus], jobs: Sequence[Job] | None = None) -> Scheduler:
        known = tuple(
            KnownCluster(
                c.name, c.speed, c.profile, c.total, c.drained,
                c.health.errors, c.health.unusable, c.health.note, c.health.trials,
            )
            for c in clusters
        )
        links = tuple((one, other, link) for (one, other), link in (self.links or {}).items())
        lab = {name: User(groups=("lab",)) for name in ("bob", "cy")}
        people = People(users=lab, limits=self.limits._settings) if self.limits else People()
        begun = Beginning(
            self.rules, tuple(self.policies.names()), known, links, people=people,
            jobs=tuple(jobs or ()), scans=self.scans if jobs is not None else {}, now=self.now,
        )
        lines: list[bytes] = []
        self.lives.append((line(beginning_to_json(begun)), lines))
        recorder = Recorder(
            lambda step: lines.append(line(step_to_json(step))), self.nonces, self.clock or (lambda: 0.0),
            self.rules.step_budget,
        )
        self.recorder = recorder
        scheduler = begun.scheduler(self.policies, recorder.nonce, recorder.clock)
        return cast(Scheduler, RecordedScheduler(scheduler, recorder))


class RecordedGrid(Grid):
    def nothing_is_kept(self) -> None:
        pass

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            for begun, steps in self.world.lives:
                replay = Replay(beginning_from_json(json.loads(begun)), builtin())
                for each in steps:
                    step = step_from_json(json.loads(each))
                    effects, divergence = replay.take(step)
                    assert divergence is None, divergence


import tests.scheduling.machine.base as base
base.World = RecordedWorld
RecordedGrid.TestCase.settings = settings(
    max_examples=MANY or 30, stateful_step_count=60, deadline=None, derandomize=not MANY, database=None, phases=[Phase.generate]
)
TestRecordedGrid = RecordedGrid.TestCase
