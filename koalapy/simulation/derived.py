"""What would have become of recorded jobs by another policy or other rules: a simulation made of a record.

Jobs arrive when they did and run as long as they did, at the speed of the clusters where they are placed now; nodes
that others had are theirs again. Each is simulated without change as well: what the simulation leaves out is in both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from koalapy.model.job import Job, JobId, JobState
from koalapy.model.request import ClusterName
from koalapy.policies.registry import Registry
from koalapy.scheduler.rules import Rules
from koalapy.simulation.changes import changed_rules, placed_by
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.local_users import LocalUser
from koalapy.simulation.outcome import JobOutcome
from koalapy.simulation.replay import History, Nodes
from koalapy.simulation.run_times import Gang, by_speed
from koalapy.simulation.simulation import Simulation, gang_of


@dataclass(frozen=True, slots=True)
class Way:
    """What became of one job. Seconds from its submission, None for what is not known."""

    gang: Gang
    waited: float | None
    """Until its program started."""
    response: float | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One job three times."""

    job: JobId
    recorded: Way
    unchanged: Way
    """In the simulation, with the policy and rules of the record."""
    changed: Way

    @property
    def is_elsewhere(self) -> bool:
        """Whether the change has it placed on other nodes."""
        return sorted(self.changed.gang) != sorted(self.unchanged.gang)


@dataclass(frozen=True, slots=True)
class Derived:
    """The jobs that ran to their end in all three, and how many others there were, by what keeps them out."""

    jobs: Sequence[Compared]
    left_out: Mapping[str, int]
    remarks: Sequence[str] = ()

    def means(self, which: str) -> dict[str, float | None]:
        """Over the jobs, of those ``recorded``, ``unchanged`` or ``changed``."""
        ways: list[Way] = [getattr(job, which) for job in self.jobs]
        waits = [way.waited for way in ways if way.waited is not None]
        responses = [way.response for way in ways if way.response is not None]
        return {"wait": fmean(waits) if waits else None, "response": fmean(responses) if responses else None}

    @property
    def elsewhere(self) -> int:
        return sum(job.is_elsewhere for job in self.jobs)


@dataclass(slots=True)
class Workload:
    """What a record tells of its jobs, as a simulation takes it."""

    planned: list[PlannedJob] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1


def derive(
    history: History, policies: Registry, *, policy: str = "", changes: Mapping[str, Any] | None = None
) -> Derived:
    """The recorded jobs with a ``policy`` for all that it serves, and with changed rules. ``UsageError``."""
    if policy:
        policies.get(policy)
    rules = changed_rules(history.beginning.rules, changes or {})
    if not history.nodes:
        return Derived((), {"no cluster was heard of": len(history.jobs)})
    grid, workload = _grid(history), _workload(history)
    unchanged = _simulated(history, grid, workload.planned, history.beginning.rules, policies)
    others = [replace(each, spec=placed_by(policy, each.spec, policies)) for each in workload.planned]
    changed = _simulated(history, grid, others, rules, policies)
    compared = []
    for planned in workload.planned:
        job = history.jobs[int(planned.label)]
        one, other = unchanged.ran.get(job.id), changed.ran.get(job.id)
        if job.state.is_final and one is not None and other is not None:
            compared.append(Compared(job.id, _recorded(job, history.beginning.now), _way(one), _way(other)))
        else:
            refused = one is not None and job.id in changed.refused
            workload.leave_out("refused with the change" if refused else "not over in each of the three")
    remarks = _remarks(history, policy, workload.planned, policies)
    first = next((job for job in changed.refused if job in unchanged.ran), None)
    if first is not None:
        remarks.append(f"with the change job {first}, for one, is refused: {changed.refused[first]}")
    return Derived(compared, workload.left_out, remarks)


@dataclass(frozen=True, slots=True)
class _Simulated:
    """What became of each job that came to its end, and why others were refused."""

    ran: Mapping[JobId, JobOutcome]
    refused: Mapping[JobId, str]


def _simulated(
    history: History, grid: SimulatedGrid, jobs: Sequence[PlannedJob], rules: Rules, policies: Registry
) -> _Simulated:
    simulation = Simulation(
        grid, rules, run_time=by_speed(grid.speeds), local_users=_local_users(history, grid), policies=policies
    )
    outcome = simulation.run(jobs)
    return _Simulated(
        {int(job.planned.label): job for job in outcome.jobs if job.started is not None},
        {int(job.planned.label): job.reason for job in outcome.not_run if job.is_refused},
    )


# What the record tells


def _grid(history: History) -> SimulatedGrid:
    """Each cluster that was heard of, as large as it ever was."""
    begun = history.beginning
    clusters = {
        known.name: SimulatedCluster(size, known.speed, known.profile)
        for known in begun.clusters
        if (size := max([seen.total for seen in history.nodes.get(known.name, ())], default=0))
    }
    links = {(one, other): link for one, other, link in begun.links if {one, other} <= clusters.keys()}
    return SimulatedGrid(clusters, links, startup=_startup(history.jobs.values()))


def _startup(jobs: Any) -> float:
    """Seconds that a component took, in the middle, from its resource manager to the barrier."""
    took = [
        component.claimed_at - component.submitted_at
        for job in jobs
        if job.attempt is not None
        for component in job.attempt.components
        if component.claimed_at is not None and component.submitted_at is not None
    ]
    return max(0.0, median(took)) if took else 0.0


def _workload(history: History) -> Workload:
    workload, speeds = Workload(), {cluster.name: cluster.speed for cluster in history.beginning.clusters}
    for job in sorted(history.jobs.values(), key=lambda job: (job.submitted_at, job.id)):
        ran = _ran(job, history)
        if ran is None:
            workload.leave_out(_why_not(job))
            continue
        assert job.attempt is not None, "it ran"
        slowest = min(speeds[component.cluster] for component in job.attempt.gang)
        spec = replace(job.spec, retry_on_exit=(), max_placement_tries=None, max_claiming_tries=None)
        at = max(0.0, job.submitted_at - history.beginning.now)
        code = job.attempt.exit_code or 0
        workload.planned.append(PlannedJob(at, spec, ran * slowest, code, label=str(job.id)))
    return workload


def _ran(job: Job, history: History) -> float | None:
    """Seconds for which a job's program ran, within the record; None where it never did."""
    attempt = job.attempt
    if attempt is None or attempt.barrier_at is None:
        return None
    ended = history.ended if attempt.ended_at is None else attempt.ended_at
    return max(0.0, ended - max(attempt.barrier_at, history.beginning.now))


def _why_not(job: Job) -> str:
    if job.state is JobState.CANCELLED:
        return "cancelled before they ran"
    return "failed before they ran" if job.state.is_final else "had not run yet"


def _local_users(history: History, grid: SimulatedGrid) -> list[LocalUser]:
    """Whoever else had nodes, or whatever was the matter with them, in the order in which they came."""
    users = [
        user
        for name, cluster in grid.clusters.items()
        for user in _others(name, cluster.nodes, history.nodes[name], history.beginning.now, history.ended)
    ]
    return sorted(users, key=lambda user: (user.at, user.cluster))


def _others(cluster: ClusterName, size: int, seen: Sequence[Nodes], began: float, ended: float) -> Iterator[LocalUser]:
    """Those who came first are taken for those who leave first."""
    there: list[tuple[float, int]] = []
    for nodes in (*seen, Nodes(ended, size, 0)):
        change = size - nodes.total + nodes.others - sum(count for _, count in there)
        if change > 0:
            there.append((began if nodes is seen[0] else nodes.at, change))
        while change < 0:
            since, count = there.pop(0)
            leave = min(count, -change)
            if leave < count:
                there.insert(0, (since, count - leave))
            if nodes.at > since:
                yield LocalUser(since - began, cluster, leave, nodes.at - since)
            change += leave


# How it is told


def _recorded(job: Job, began: float) -> Way:
    """From when the record began, for a job that was there by then."""
    attempt, since = job.attempt, max(job.submitted_at, began)
    started = attempt.barrier_at if attempt is not None else None
    return Way(
        gang_of(attempt) if attempt is not None else (),
        None if started is None else started - since,
        None if job.ended_at is None else job.ended_at - since,
    )


def _way(job: JobOutcome) -> Way:
    return Way(job.gang, job.waited, job.response)


def _remarks(history: History, policy: str, planned: Sequence[PlannedJob], policies: Registry) -> list[str]:
    """What the simulation knows nothing of, where there was any."""
    remarks, people = [], history.beginning.people
    if policy:
        other = sum(job.spec.request.type not in policies.get(policy).serves for job in planned)
        if other:
            remarks.append(f"{other} jobs keep their policy: {policy} does not serve their requests")
    if any(job.attempt is not None and len(gang_of(job.attempt)) > 1 for job in history.jobs.values()):
        remarks.append("how much longer a job runs on several clusters is taken to be as it was, wherever it is placed")
    if people.limits.default != type(people.limits.default)() or people.limits.users or people.limits.groups:
        remarks.append("limits of users and groups do not hold in the simulation")
    if any(domain.identity != "service" for domain in people.domains.values()):
        remarks.append("in the simulation everybody may use every cluster")
    return remarks
