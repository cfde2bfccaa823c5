"""Alerts: current problems, each with its cause and remedy."""

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
OPERATORS_SEE_IT = "the operators of the daemon see this alert too"


class Severity(StrEnum):
    """The severity of an alert."""

    WARNING = "warning"
    """A problem that affects few users, or will become critical."""
    CRITICAL = "critical"
    """A problem that makes jobs fail, stop or get lost."""


class AlertKind(StrEnum):
    """The kind of problem that an alert reports."""

    AGENT_AWAY = "agent-away"
    """The agent of a cluster is not connected."""
    RESOURCE_MANAGER = "resource-manager"
    """The resource manager of a cluster does not respond, or accepts no jobs."""
    BLACK_HOLE = "black-hole"
    """Jobs on a cluster fail soon after their start."""
    CLUSTER_FLAPPING = "cluster-flapping"
    """A cluster is lost and returns repeatedly."""
    AGENT_FLOODS = "agent-floods"
    """An agent sends more than the daemon accepts from one cluster."""
    OLD_VERSION = "old-version"
    """The daemon and an agent have different versions."""
    CLAIM_STUCK = "claim-stuck"
    """A job has tried to claim its nodes for too long."""
    JOB_STARVES = "job-starves"
    """A job waits for long while jobs submitted later start."""
    QUEUE_FLOODED = "queue-flooded"
    """Most waiting jobs belong to one user."""
    DATABASE = "database"
    """The database is slow, or rejects writes."""
    CERTIFICATE = "certificate"
    """The daemon's certificate has expired or expires soon, or its new files are invalid."""
    DISK = "disk"
    """A disk is nearly full."""
    SLOW_LINK = "slow-link"
    """The network between two clusters is much slower than expected, or is down."""
    CLOCK = "clock"
    """The clock of the daemon's host or of an agent's host is wrong."""
    RELAY = "relay"
    """The hub of relayed links is not reachable, or the relay of a site is not connected to it."""
    REPLICAS_GONE = "replicas-gone"
    """Files of the replica catalogue are missing or have changed."""
    RECORD = "record"
    """The recording of scheduler events has stopped."""
    RECORDS_LOST = "records-lost"
    """An agent has lost the records of components; their jobs start again."""


CLUSTER_ALERTS = frozenset(
    {
        AlertKind.AGENT_AWAY,
        AlertKind.RESOURCE_MANAGER,
        AlertKind.BLACK_HOLE,
        AlertKind.CLUSTER_FLAPPING,
        AlertKind.SLOW_LINK,
        AlertKind.RELAY,
        AlertKind.REPLICAS_GONE,
    }
)
"""Kinds that concern clusters. All users see them; the other kinds only operators and the user that they name."""


class MarkAction(StrEnum):
    """What an operator did with an alert."""

    ACKNOWLEDGE = "acknowledge"
    """The alert stays listed, with the operator who works on it, until it ends."""
    SILENCE = "silence"
    """The alert is not listed and sends no notifications, also when it begins again."""


AlertKey = tuple[AlertKind, str]
"""The identity of an alert: its kind and target."""


MAX_AHEAD_S = 300.0
"""Seconds by which a mark may be in the future, since the clocks of daemon hosts differ."""


@dataclass(frozen=True, slots=True)
class AlertMark:
    """An acknowledgement or silence of an alert, valid until a time in seconds since the epoch."""

    kind: AlertKind
    target: str
    action: MarkAction
    by: str
    at: float
    until: float
    reason: str = ""

    @property
    def key(self) -> AlertKey:
        return self.kind, self.target

    def applies_to(self, alert: "Alert", now: float) -> bool:
        """Return whether the mark is valid for an alert.

        An acknowledgement does not apply to an alert that began after it. Neither does a mark that a daemon with a
        wrong clock made in the future: it would last for as long.
        """
        is_valid = self.at - MAX_AHEAD_S <= now < self.until
        return is_valid and (self.action is MarkAction.SILENCE or self.at >= alert.since)


@dataclass(frozen=True, slots=True)
class Alert:
    """A current problem, identified by its kind and target."""

    kind: AlertKind
    severity: Severity
    target: str
    """What the alert is about: ``cluster north``, ``job 12``, ``user alice``, ``link north-south``."""
    summary: str
    """The problem in one sentence."""
    cause: str
    """The cause, as far as it is known."""
    remedy: str
    """What to do: one sentence with a command."""
    since: float
    cluster: ClusterName = ""
    job: JobId | None = None
    user: str = ""
    """The user that the alert concerns, or the owner of the job."""
    mark: AlertMark | None = None
    """Its acknowledgement or silence; None: neither."""

    @property
    def key(self) -> AlertKey:
        return self.kind, self.target

    @property
    def is_silenced(self) -> bool:
        return self.mark is not None and self.mark.action is MarkAction.SILENCE

    def visible_to(self, identity: Identity) -> "Alert | None":
        """Return the alert as a caller may see it; None if the caller may not see it.

        Operators see all alerts; users those about clusters, themselves and their own jobs.
        """
        if identity.has_role(Role.OPERATOR):
            return self
        if self.user:
            return self._for_owner() if identity.owns(self.user) else None
        return replace(self, remedy=OPERATORS_SEE_IT, mark=None) if self.kind in CLUSTER_ALERTS else None

    def _for_owner(self) -> "Alert":
        """Replace a remedy that acts on the jobs of other users, and a cause that names them."""
        if self.kind is AlertKind.JOB_STARVES:
            return replace(self, remedy=f"see what it waits for: koala explain {self.job}")
        if self.kind is AlertKind.QUEUE_FLOODED:
            return replace(self, cause="others wait as well", remedy=LET_OTHERS_GO)
        return self


def urgency_key(alert: Alert) -> tuple[bool, float, str, str]:
    """Return a sort key: critical alerts first, then the oldest first."""
    return alert.severity is not Severity.CRITICAL, alert.since, alert.kind, alert.target


@dataclass(frozen=True, slots=True)
class AlertRules:
    """The conditions that raise alerts; the section ``alerts`` of the configuration. Times are in seconds."""

    hold: Annotated[float, Ge(0), Le(1e9)] = 5.0
    """Time that a problem must last before its alert is raised. Notifications are sent if it then lasts as long
    again."""
    release: Annotated[float, Ge(0), Le(1e9)] = 15.0
    """Time that a problem must be gone before its alert is cleared."""
    black_hole_failures: Count = 5
    """Number of early failures on one cluster that make it a black hole. They must be most jobs that ended there, and
    either succeed on other clusters or belong to several users."""
    black_hole_soon: Seconds = 30.0
    """Time after its start within which a failure is early."""
    black_hole_window: Seconds = 900.0
    """Period over which early failures are counted."""
    flapping_changes: Count = 4
    """Number of losses of a cluster within ``flapping_window`` that raise the alert."""
    flapping_window: Seconds = 900.0
    """Period over which losses of a cluster are counted."""
    claim_stuck_after: Seconds = 180.0
    """Maximum duration of a claim; for a job with input files, counted from their arrival."""
    starving_after: Seconds = 3600.0
    """Maximum time that a job may wait while jobs submitted later start."""
    flood_jobs: Count = 500
    """Number of waiting jobs of one user that are a flood, if they are also ``flood_share`` of all waiting jobs and
    another user waits."""
    flood_share: Share = 0.8
    """Share of all waiting jobs that a flood must have."""
    database_slow: Seconds = 0.5
    """Maximum for the median duration of the transactions of the last minute."""
    slow_link_share: Share = 0.25
    """Share of its configured or earlier measured bandwidth below which a link is slow."""
