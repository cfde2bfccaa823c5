"""What the scheduler wants done, and everything a step changed."""

from dataclasses import dataclass, field
from enum import StrEnum

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.job import Attempt, Job, JobId, Priority, TimelineEntry, Token
from koalapy.model.placement import RefusalKind
from koalapy.model.request import ClusterName, StopWarning

MAX_STRAYS = 10_000
"""Of a cluster, to be told to end at a time: what an agent makes up fills no database."""


@dataclass(frozen=True, slots=True)
class SubmitComponent:
    """Hand the component's runner to the cluster's resource manager."""

    cluster: ClusterName
    token: Token


@dataclass(frozen=True, slots=True)
class OpenBarrier:
    """Every node of the gang waits: start the program."""

    cluster: ClusterName
    token: Token


@dataclass(frozen=True, slots=True)
class StopComponent:
    """End the component, whatever it is doing."""

    cluster: ClusterName
    token: Token
    reason: str
    stray: bool = False
    """Whether it is of no live attempt: when there are very many of those, it is told when it is heard of again."""
    warning: StopWarning | None = None
    """What its program is told before, and the grace that it has then."""


@dataclass(frozen=True, slots=True)
class ForgetComponent:
    """Nothing more is wanted of an ended component."""

    cluster: ClusterName
    token: Token


@dataclass(frozen=True, slots=True)
class StageComponent:
    """Bring a component's files to its cluster; ``token`` is that of the stage (``Job.stage_token``)."""

    cluster: ClusterName
    token: Token


@dataclass(frozen=True, slots=True)
class UnstageComponent:
    """A stage is not wanted any more: end what is still on its way, and remove its files; ``stray`` as for a stop."""

    cluster: ClusterName
    token: Token
    stray: bool = False


class ClaimFailure(StrEnum):
    """Why a component did not get the nodes that were claimed for it."""

    NO_ROOM = "no-room"
    """They were taken before it could be submitted."""
    LOCAL_USERS = "local-users"
    """Its resource manager gave them to others."""
    NOT_STARTED = "not-started"
    """Its resource manager did not start it, and said why."""
    KEPT = "kept"
    """Those that had them before did not let them go."""
    RESOURCE_MANAGER = "resource-manager"
    """Its resource manager has trouble."""
    LIMIT = "limit"
    """Its resource manager takes no more of us."""


class AttemptFailure(StrEnum):
    """Why an attempt failed by no fault of its program."""

    CLUSTER = "cluster"
    """Its agent told of it: it could not be submitted, or its nodes failed."""
    LOST = "lost"
    """Its cluster knows nothing of a component any more, or was out of reach for too long."""
    ENDED_EARLY = "ended-early"
    """Its nodes were given back before its program had ended."""
    NOT_REPORTED = "not-reported"
    """Nodes that were its own never reported."""
    NOT_LAUNCHED = "not-launched"
    """Its program was never launched."""
    FILES = "files"
    """Its inputs could not be brought."""
    REFUSED = "refused"
    """A resource manager refused it, and its words concern neither a limit nor, as far as is known, the cluster."""


Command = SubmitComponent | OpenBarrier | StopComponent | ForgetComponent | StageComponent | UnstageComponent


@dataclass(slots=True)
class Effects:
    """What one step changed, to be written in one transaction before any command is sent."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    """As they are after the step."""
    attempts: list[tuple[JobId, Attempt]] = field(default_factory=list)
    """Attempts as they ended, of jobs that have begun a newer one since."""
    timeline: list[TimelineEntry] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    clusters: set[ClusterName] = field(default_factory=set)
    """Clusters whose error count or state changed."""
    confirm: set[ClusterName] = field(default_factory=set)
    """Clusters that are to tell all they know, and then that they have: see ``events.ClusterConfirmed``."""
    advised: list[AdvisedPlacement] = field(default_factory=list)
    """Of jobs that were placed by advice."""
    scans: dict[Priority, int] = field(default_factory=dict)
    """Of the placement queues that were scanned periodically: how often by now."""
    refusals: dict[RefusalKind, int] = field(default_factory=dict)
    """Tries to place a job, or all jobs that ask for the same, that came to nothing; by what was in the way."""
    claims_failed: dict[tuple[ClusterName, ClaimFailure], int] = field(default_factory=dict)
    """How many, as of the refusals and the attempts."""
    attempts_failed: dict[tuple[ClusterName, AttemptFailure], int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    """What the operator should know; for the log only."""

    def __bool__(self) -> bool:
        return bool(self.jobs or self.timeline or self.commands or self.clusters or self.scans)
