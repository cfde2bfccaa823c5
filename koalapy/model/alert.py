"""What is wrong at the moment: what it is, why, and what helps."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Gt, Le

from koalapy.model.identity import Identity, Role
from koalapy.model.job import JobId
from koalapy.model.request import ClusterName

Seconds = Annotated[float, Gt(0), Le(1e9)]
Share = Annotated[float, Gt(0), Le(1)]
Count = Annotated[int, Ge(1)]
LET_OTHERS_GO = "let others have their turn: koala hold $(koala queue --state queued -q), and koala release later"
OPERATORS_SEE_IT = "the operators of the daemon are told of it, too"


class Severity(StrEnum):
    """How much hangs on it."""

    WARNING = "warning"
    """It will be trouble, or is for some."""
    CRITICAL = "critical"
    """Jobs fail, stand still or are lost."""


class AlertKind(StrEnum):
    """What may be wrong."""

    AGENT_AWAY = "agent-away"
    """A cluster's agent is not heard of."""
    RESOURCE_MANAGER = "resource-manager"
    """A cluster's resource manager does not answer, or takes no jobs."""
    BLACK_HOLE = "black-hole"
    """A cluster takes jobs, and they fail there at once."""
    CLUSTER_FLAPPING = "cluster-flapping"
    """A cluster comes and goes."""
    OLD_VERSION = "old-version"
    """The daemon and an agent are of different versions."""
    CLAIM_STUCK = "claim-stuck"
    """A job asks for its nodes, and neither gets them nor gives up."""
    JOB_STARVES = "job-starves"
    """A job waits while others that came later are given nodes."""
    QUEUE_FLOODED = "queue-flooded"
    """Most of what waits is one user's."""
    DATABASE = "database"
    """The database is slow, or takes nothing."""
    CERTIFICATE = "certificate"
    """The daemon's certificate has expired or expires soon, or its new files are refused."""
    CONFIGURATION = "configuration"
    """The configuration file has other settings than the daemon runs with."""
    DISK = "disk"
    """A disk is nearly full."""
    SLOW_LINK = "slow-link"
    """The network between two clusters is much slower than it should be, or they do not reach each other."""
    REPLICAS_GONE = "replicas-gone"
    """Files of the replica catalogue are not where it says, or not what it says."""
    RECORD = "record"
    """What the scheduler is told is not recorded any more."""
    RECORDS_LOST = "records-lost"
    """An agent has lost the records of components: their jobs are tried again."""


CLUSTER_ALERTS = frozenset(
    {
        AlertKind.AGENT_AWAY,
        AlertKind.RESOURCE_MANAGER,
        AlertKind.BLACK_HOLE,
        AlertKind.CLUSTER_FLAPPING,
        AlertKind.SLOW_LINK,
        AlertKind.REPLICAS_GONE,
    }
)
"""Kinds that concern clusters, and so everybody; the others are told to operators, and to the user they name."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that is wrong now. The kind and the target say which one it is."""

    kind: AlertKind
    severity: Severity
    target: str
    """What it is about, for people: ``cluster north``, ``job 12``, ``user alice``, ``link north-south``."""
    summary: str
    """What is wrong, in one sentence without its target's history."""
    cause: str
    """Why, as far as it is known."""
    remedy: str
    """What helps: one sentence with a command."""
    since: float
    cluster: ClusterName = ""
    job: JobId | None = None
    user: str = ""
    """Whose job it is about, or who it is about."""

    @property
    def key(self) -> tuple[AlertKind, str]:
        return self.kind, self.target

    def visible_to(self, identity: Identity) -> "Alert | None":
        """As somebody is told of it: operators all, others what concerns clusters, their own jobs and themselves."""
        if identity.has_role(Role.OPERATOR):
            return self
        if self.user:
            return self._for_owner() if identity.owns(self.user) else None
        return replace(self, remedy=OPERATORS_SEE_IT) if self.kind in CLUSTER_ALERTS else None

    def _for_owner(self) -> "Alert":
        """What helps a job that starves is done to others' jobs; and who waits behind a flood is not told its user."""
        if self.kind is AlertKind.JOB_STARVES:
            return replace(self, remedy=f"see what it waits for: koala explain {self.job}")
        if self.kind is AlertKind.QUEUE_FLOODED:
            return replace(self, cause="others wait as well", remedy=LET_OTHERS_GO)
        return self


def urgency_key(alert: Alert) -> tuple[bool, float, str, str]:
    """What to look at first, as a key to sort by: the critical before the others, the oldest first."""
    return alert.severity is not Severity.CRITICAL, alert.since, alert.kind, alert.target


@dataclass(frozen=True, slots=True)
class AlertRules:
    """From when on something is an alert; the section ``alerts`` of the configuration. Times in seconds."""

    hold: Annotated[float, Ge(0), Le(1e9)] = 5.0
    """For how long it must be so before it is told."""
    release: Annotated[float, Ge(0), Le(1e9)] = 15.0
    """For how long it must be over before it is told no more."""
    black_hole_failures: Count = 5
    """So many jobs that failed soon after their start on one cluster make it a black hole, if they are most of those
    that ended there and do better elsewhere, or are not all one user's."""
    black_hole_soon: Seconds = 30.0
    """How long after its start a failure is soon."""
    black_hole_window: Seconds = 900.0
    """Of how long ago endings count."""
    flapping_changes: Count = 4
    """So often a cluster must have been lost within ``flapping_window``."""
    flapping_window: Seconds = 900.0
    """Of how long ago losses count."""
    claim_stuck_after: Seconds = 180.0
    """For how long a job may ask for its nodes; with input files, from when they are there."""
    starving_after: Seconds = 3600.0
    """For how long a job may wait while others that came later are given nodes."""
    flood_jobs: Count = 500
    """So many waiting jobs of one user are a flood, if they are ``flood_share`` of all, and others wait as well."""
    flood_share: Share = 0.8
    """How large a part of all that waits a flood is."""
    database_slow: Seconds = 0.5
    """How long a transaction may take, in the middle of those of the last minute."""
    slow_link_share: Share = 0.25
    """A link that has less of the bandwidth that is configured or was measured before is slow."""
