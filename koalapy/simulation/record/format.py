"""The content of a record, a scheduler's initial state and its steps, and its conversion to lines of JSON and back.

Numbers are exact, infinity included. Fields that affect no decision are omitted: environment variables, which may be
secret, recipients of notifications, and an agent's disks, versions and call statistics. Of a script only its presence
is recorded.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_args

from annotated_types import Ge, Le
from pydantic import TypeAdapter

from koalapy.model.advice import Run
from koalapy.model.cluster import ClusterStanding, Link, LinkUse, Relays
from koalapy.model.job import Job, JobId, Nonce, PlannedStart, Token
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.limits import Charge, FairShareSettings, Limits, LimitSettings, NodeUse
from koalapy.model.profile import ClusterProfile, Mpi
from koalapy.model.reports import ClusterReport, ComponentStatus, StageStatus
from koalapy.model.request import ClusterName
from koalapy.model.reservation import Reservation
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.policies.registry import Registry
from koalapy.scheduler import events as ev
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.claims.claim import Nonces
from koalapy.scheduler.cluster_conditions import HealthStatus
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Event
from koalapy.scheduler.fair_share import FairShares
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.queue.candidates import Clock
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState


class Placed(NamedTuple):
    """A placed component of a job."""

    cluster: ClusterName
    nodes: int
    node_class: str = ""


class JobNow(NamedTuple):
    """The state of a job after a step that changed it."""

    job: JobId
    state: str
    generation: int
    gang: tuple[Placed, ...]


class TimelineStep(NamedTuple):
    """A timeline entry of a job, without its reason text."""

    job: JobId
    event: str
    generation: int
    component: int | None
    cluster: ClusterName | None


class OrderedCommand(NamedTuple):
    """A command to the agent of a cluster."""

    what: str
    cluster: ClusterName
    token: Token


class Done(NamedTuple):
    """The externally visible effects of a step."""

    jobs: tuple[JobNow, ...] = ()
    timeline: tuple[TimelineStep, ...] = ()
    commands: tuple[OrderedCommand, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.jobs or self.timeline or self.commands)

    @classmethod
    def from_effects(cls, effects: Effects) -> "Done":
        """Select from a step's effects what the record compares."""
        return cls(
            tuple(
                JobNow(
                    job.id,
                    str(job.state),
                    job.generation,
                    tuple(Placed(c.cluster, c.size, c.node_class) for c in job.attempt.gang) if job.attempt else (),
                )
                for job in effects.jobs.values()
            ),
            tuple(TimelineStep(e.job, e.event, e.generation, e.component, e.cluster) for e in effects.timeline),
            tuple(OrderedCommand(type(c).__name__, c.cluster, c.token) for c in effects.commands),
        )


Count = Annotated[int, Ge(0), Le(2**53)]
Moment = Annotated[float, Ge(0), Le(253_402_300_799.0)]
"""Time in seconds since 1970, up to the year 9999."""


NOTHING_DONE = Done()


@dataclass(frozen=True, slots=True)
class Step:
    """The events of one step, its nonces and clock readings, and its effects."""

    number: Count
    """Number within the daemon run, from 1 without a gap."""
    at: Moment
    events: tuple[Event, ...] = ()
    refused: tuple[Count, ...] = ()
    """Indices of the events that were rejected."""
    nonces: tuple[Nonce, ...] = ()
    looks: tuple[tuple[Count, Count], ...] = ()
    """Clock readings as (count, ticks) of equal readings in a row; empty if all are 0."""
    done: Done = NOTHING_DONE


@dataclass(frozen=True, slots=True)
class KnownCluster(ClusterStanding):
    """The stored and configured state of a cluster, before its agent reports."""

    speed: float = 1.0
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    total: int = 0
    errors: int = 0
    uplink_bandwidth: float | None = None

    def make_status(self) -> ClusterStatus:
        """Return a new mutable status of the cluster."""
        # Errors of a usable cluster count anew: their jobs are not stored, and one job must not count several times.
        health = HealthStatus(self.errors if self.unusable else 0, self.unusable, self.note, self.trials)
        cluster = ClusterStatus(self.name, self.speed, self.profile, health=health, drained=self.drained)
        cluster.planned_drains = self.planned_drains
        cluster.nodes.last_report, cluster.uplink.bandwidth = ClusterReport(self.total, 0), self.uplink_bandwidth
        return cluster

    def without_configuration(self) -> "KnownCluster":
        """Return a copy with only the fields of ``ClusterProfile`` and ``Mpi``, without those that the configuration
        adds."""
        profile_values = {field.name: getattr(self.profile, field.name) for field in fields(ClusterProfile)}
        profile = ClusterProfile(**profile_values | {"mpi": Mpi(self.profile.mpi.series)})
        return KnownCluster(**{field.name: getattr(self, field.name) for field in fields(self)} | {"profile": profile})


@dataclass(frozen=True, slots=True)
class People:
    """The users, their accounts on clusters, and their limits."""

    users: Mapping[str, User] = field(default_factory=dict)
    unmapped: tuple[ClusterName, ...] = ()
    """Clusters with accounts that may submit jobs although ``users`` does not map them."""
    domains: Mapping[ClusterName, Domain] = field(default_factory=dict)
    limits: LimitSettings = field(default_factory=LimitSettings)
    limits_contact: str = ""
    past_use: tuple[NodeUse, ...] = ()
    """Node use of ended jobs within the last day, if such use is limited."""
    fair_share: FairShareSettings | None = None
    """The weights of users and groups; None: waiting jobs are not ordered by them."""
    charges: tuple[Charge, ...] = ()
    """The charged use of ended jobs, if waiting jobs are ordered by it."""

    def make_accounts(self) -> Accounts:
        return Accounts(self._make_users(), self.domains)

    def make_owner_use(self) -> OwnerUse:
        groups_of = self._make_users().groups_of
        shares = None if self.fair_share is None else FairShares(self.fair_share, groups_of, self.charges)
        return OwnerUse(Limits(self.limits, groups_of, self.limits_contact), self.past_use, shares)

    def _make_users(self) -> Users:
        return Users(self.users, self.unmapped)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The initial state of a scheduler: rules, clusters, links, users, replicas, run times and unfinished jobs."""

    rules: Rules
    policies: tuple[str, ...]
    """Names of all policies."""
    clusters: tuple[KnownCluster, ...]
    links: tuple[tuple[ClusterName, ClusterName, Link], ...] = ()
    runs: tuple[Run, ...] = ()
    """Runs from which the advisor learns, oldest first."""
    people: People = field(default_factory=People)
    replicas: Mapping[str, tuple[ClusterName, ...]] = field(default_factory=dict)
    """Clusters with a replica, by logical file."""
    jobs: tuple[Job, ...] = ()
    scans: Mapping[Priority, int] = field(default_factory=dict)
    """Number of scans so far of each placement queue."""
    now: Moment = 0.0
    """Time at which the scheduler takes up the jobs, in seconds since 1970."""
    streams: int = 0
    """Maximum number of streams over the hub of the relays; 0: there is no hub."""
    link_uses: tuple[tuple[ClusterName, ClusterName, LinkUse], ...] = ()
    """The configured paths of MPI messages between clusters."""
    past_starts: tuple[PlannedStart, ...] = ()
    """Planned starts of jobs that have started, oldest first."""
    reservations: tuple[Reservation, ...] = ()
    """The reservations that are in force."""

    def make_scheduler(
        self, policies: Registry, nonces: Nonces, clock: Clock | None, *, keeps_effects: bool = True
    ) -> Scheduler:
        """Return a new scheduler with this state and these jobs. See ``Scheduler`` for the other parameters."""
        speeds = {cluster.name: cluster.speed for cluster in self.clusters}
        state = SchedulerState(
            self.rules,
            policies,
            [cluster.make_status() for cluster in self.clusters],
            {(first, second): link for first, second, link in self.links},
            Experience(speeds, self.runs),
            self.people.make_accounts(),
            self.people.make_owner_use(),
            Relays(self.streams, {(first, second): use for first, second, use in self.link_uses}),
            self.past_starts,
        )
        state.grid.set_replicas(self.replicas)
        scheduler = Scheduler(state, nonces, clock, keeps_effects=keeps_effects)
        scheduler.restore(self.jobs, self.now, self.scans, self.reservations)
        return scheduler


Json = dict[str, Any]
Kind = type[Any]
FORMAT = 2
"""Version of the format: incremented with changes that an older reader would misread. Earlier ones are read."""
EVENTS = {kind.__name__: kind for kind in get_args(ev.Event)}
REPORTS = {kind.__name__: kind for kind in (ComponentStatus, ClusterReport, StageStatus)}
FOR_PEOPLE = ("environment", "account", "qos", "each_line", "mail_type", "mail_user", "webhook")
"""Fields of a job that are omitted."""
OF_AGENTS = ("calls", "disks", "versions")
"""Fields of a report that are omitted."""


def encode_line(content: Json) -> bytes:
    return _encode_json(content).encode() + b"\n"


_encode_json = json.JSONEncoder(separators=(",", ":")).encode


# Initial state


def beginning_to_json(beginning: Beginning) -> Json:
    recorded = replace(
        beginning, clusters=tuple(cluster.without_configuration() for cluster in beginning.clusters), jobs=()
    )
    data: Json = _adapter_for(Beginning).dump_python(recorded, mode="json")
    return data | {"jobs": [job_to_json(job) for job in beginning.jobs]}


def beginning_from_json(data: Json) -> Beginning:
    """Return an initial state from JSON. Raise one of ``replay.NOT_READ`` for invalid data."""
    other_values = {name: value for name, value in data.items() if name != "jobs"}
    begun: Beginning = _adapter_for(Beginning).validate_python(other_values)
    return replace(begun, jobs=tuple(job_from_json(job) for job in data.get("jobs", ())))


def job_to_json(job: Job) -> Json:
    return _fields_to_json(job, "spec") | {"spec": _spec_to_json(job.spec)}


def _spec_to_json(spec: JobSpec) -> Json:
    # Clusters accept scripts or not, whatever their text.
    return _fields_to_json(spec if not spec.script else replace(spec, script="#!"), *FOR_PEOPLE)


def job_from_json(data: Json) -> Job:
    job: Job = _adapter_for(Job).validate_python(data)
    return job


# Steps


def step_to_json(step: Step) -> Json:
    """Return the content of a step's line, without empty fields."""
    content: Json = {"n": step.number, "at": step.at}
    if step.events:
        content["events"] = [_event_to_json(event) for event in step.events]
    for name in ("refused", "nonces", "looks"):
        if items := getattr(step, name):
            content[name] = items
    if step.done:
        content["done"] = step.done
    return content


def step_from_json(data: Json) -> Step:
    """Return a step from JSON. Raise one of ``replay.NOT_READ`` for invalid data."""
    events = tuple(_event_from_json(*event) for event in data.get("events", ()))
    other_values = {name: value for name, value in data.items() if name not in ("n", "events")}
    step: Step = _adapter_for(Step).validate_python(other_values | {"number": data["n"], "events": events})
    return step


def _event_to_json(event: ev.Event) -> Sequence[Any]:
    """Return an event as a sequence: the name of its type, then its content without fields that affect no decision."""
    kind = type(event).__name__
    if isinstance(event, ev.Reported):
        report = event.report
        return kind, event.cluster, type(report).__name__, _fields_to_json(report, *OF_AGENTS)
    if isinstance(event, ev.JobSubmitted):
        return kind, job_to_json(event.job), event.by
    if isinstance(event, ev.JobChanged):
        return kind, event.job, _spec_to_json(event.spec), event.by
    return kind, _fields_to_json(event)


def _event_from_json(kind: str, *values: Any) -> ev.Event:
    """Return an event from the name of its type and its content. Raise one of ``replay.NOT_READ`` for invalid data."""
    if kind == ev.Reported.__name__:
        cluster, report_kind, report = values
        return ev.Reported(cluster, _adapter_for(REPORTS[report_kind]).validate_python(report))
    if kind == ev.JobSubmitted.__name__:
        job, user = values
        return ev.JobSubmitted(job_from_json(job), user)
    if kind == ev.JobChanged.__name__:
        number, spec, user = values
        return ev.JobChanged(number, _adapter_for(JobSpec).validate_python(spec), by=user)
    event: ev.Event = _adapter_for(EVENTS[kind]).validate_python(values[0])
    return event


@cache
def _adapter_for(kind: Kind) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _fields_to_json(value: Any, *leave_out: str) -> Json:
    """Return the fields of a value as JSON, without those that have their default values."""
    names, defaults, values_of = _fields_of(value.__class__)
    triples = zip(names, values_of(value), defaults, strict=True)
    changed = {name for name, field_value, default in triples if field_value != default}
    data: Json = _adapter_for(value.__class__).dump_python(value, mode="json", include=changed.difference(leave_out))
    return data


@cache
def _fields_of(kind: Kind) -> tuple[tuple[str, ...], tuple[Any, ...], Callable[[Any], Any]]:
    """Return the names of a dataclass's fields, their defaults, and the function that reads all of them."""
    names = tuple(field.name for field in fields(kind))
    values_of = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),) if names else ()
    defaults = (f.default if f.default_factory is MISSING else f.default_factory() for f in fields(kind))
    return names, tuple(defaults), values_of
