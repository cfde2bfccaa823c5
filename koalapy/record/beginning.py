"""The initial state of a scheduler: all that a daemon knows at its start, as a serializable value."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from koalapy.model.advice import Run
from koalapy.model.cluster import Drain, Link, LinkUse, Relays
from koalapy.model.job import Job
from koalapy.model.job_spec import Priority
from koalapy.model.limits import Limits, LimitSettings, NodeUse
from koalapy.model.profile import ClusterProfile, Mpi
from koalapy.model.request import ClusterName
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.policies.registry import Registry
from koalapy.record.step import Moment
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.claims.claim import Nonces
from koalapy.scheduler.cluster_conditions import HealthStatus
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.queue.candidates import Clock
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class KnownCluster:
    """The stored and configured state of a cluster, before its agent reports."""

    name: ClusterName
    speed: float = 1.0
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    total: int = 0
    drained: Drain | None = None
    errors: int = 0
    unusable: bool = False
    note: str = ""
    trials: int = 0
    uplink_bandwidth: float | None = None

    def make_status(self) -> ClusterStatus:
        """Return a new mutable status of the cluster."""
        health = HealthStatus(self.errors, self.unusable, self.note, self.trials)
        cluster = ClusterStatus(self.name, self.speed, self.profile, health=health, drained=self.drained)
        cluster.total, cluster.uplink.bandwidth = self.total, self.uplink_bandwidth
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

    def make_accounts(self) -> Accounts:
        return Accounts(self._make_users(), self.domains)

    def make_owner_use(self) -> OwnerUse:
        return OwnerUse(Limits(self.limits, self._make_users().groups_of, self.limits_contact), self.past_use)

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
        )
        state.grid.set_replicas(self.replicas)
        scheduler = Scheduler(state, nonces, clock, keeps_effects=keeps_effects)
        scheduler.restore(self.jobs, self.now, self.scans)
        return scheduler
