"""A recorded day once more: as it was, step by step; or simulated, with another policy or other rules."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from koalapy.model.errors import KoalaError, UsageError
from koalapy.model.job import Job, JobId
from koalapy.model.reports import ClusterReport
from koalapy.model.request import ClusterName
from koalapy.policies.registry import Registry
from koalapy.record.beginning import Beginning
from koalapy.record.reading import AGAIN, NOT_READ, Life, RecordFile
from koalapy.record.replay import Divergence, Replay
from koalapy.record.step import Step
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Reported


@dataclass(frozen=True, slots=True)
class Nodes:
    """What a cluster's agent said of its nodes at a moment."""

    at: float
    total: int
    others: int
    """Nodes that local users had, or that were down."""


@dataclass(slots=True)
class History:
    """What happened in one daemon's life, as its record tells it."""

    life: str
    version: str
    beginning: Beginning
    steps: int = 0
    ended: float = 0.0
    """The time of its last step."""
    placements: int = 0
    submitted: list[JobId] = field(default_factory=list)
    jobs: dict[JobId, Job] = field(default_factory=dict)
    """All, as they stood at last."""
    nodes: dict[ClusterName, list[Nodes]] = field(default_factory=dict)
    divergence: Divergence | None = None
    """Where the replay did something else than what was recorded; it ends there."""

    def take(self, step: Step, effects: Effects) -> None:
        self.steps, self.ended = step.number, step.at
        self.jobs |= effects.jobs
        self.placements += sum(entry.event == "placed" for entry in effects.timeline)
        for event in step.events:
            if isinstance(event, Reported) and isinstance(report := event.report, ClusterReport) and report.total:
                seen = Nodes(step.at, report.total, report.background + report.down)
                self.nodes.setdefault(event.cluster, []).append(seen)


def replay(path: Path, policies: Registry, lost: list[str] | None = None) -> Iterator[History]:
    """Each life in a record, as it was. ``UsageError`` for what cannot be read, or names a policy that there is not.

    ``lost`` is given what the daemon that exported it could not read or write of it, up to where this has come.
    """
    file = RecordFile(path)
    if lost is not None:
        file.lost = lost
    for life in file.lives():
        yield _replayed(life, policies, path)


def _replayed(life: Life, policies: Registry, path: Path) -> History:
    missing = sorted(set(life.beginning.policies) - set(policies.names()))
    if missing:
        raise UsageError(
            f"{path} was written with policies that there are not here: {', '.join(missing)}",
            field="file",
            value=str(path),
            hint="install them, as koala policies of the daemon",
        )
    history = History(life.name, life.version, life.beginning, ended=life.beginning.now)
    history.jobs = {job.id: job for job in life.beginning.jobs}
    try:
        for step, effects, divergence in Replay(life.beginning, policies).take_all(life.steps):
            history.take(step, effects)
            history.divergence = divergence
    except KoalaError:
        raise
    except NOT_READ as error:
        # No daemon writes of clusters or jobs that it does not know.
        raise UsageError(
            f"{path} tells after step {history.steps} of what there is not: {error!r:.100}",
            field="file",
            value=str(path),
            hint=AGAIN,
        ) from error
    return history
