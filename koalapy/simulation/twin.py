"""Forecasts of waiting jobs by repeated simulation of a snapshot of the live grid, as it is or with a change.

Each repetition draws new run times, so each result is an interval. Local users keep their nodes, and no further jobs
are submitted; the forecast holds only under these two assumptions.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import exp, inf
from random import Random
from statistics import fmean, median
from typing import Any

from pydantic import TypeAdapter, ValidationError

from koalapy.model.advice import Run, Size, run_size
from koalapy.model.application import application_of
from koalapy.model.cluster import Drain, check_cluster
from koalapy.model.errors import UsageError
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName, FlexibleRequest
from koalapy.model.wording import format_list, suggest_names
from koalapy.policies.registry import Registry, builtin_policies
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import Gang, PlannedJob
from koalapy.simulation.moment import Moment, NodesNow
from koalapy.simulation.processes import count_processors, forked_map
from koalapy.simulation.record.format import KnownCluster
from koalapy.simulation.simulation import Simulation

ENOUGH = 3
"""Minimum number of runs of one size that are preferred to the runs of all sizes of an application."""
FEW_SCATTER = 0.7
"""Standard deviation of the logarithm of a run time that is estimated from fewer runs."""
NOTHING_KNOWN = 3600.0
"""Mean run time in seconds of a job for which there is no information at all."""


class RunTimeEstimates:
    """Run-time distributions of jobs, from the runs up to the time of a snapshot."""

    def __init__(self, runs: Sequence[Run], speeds: Mapping[ClusterName, float]) -> None:
        self._experience, self._speeds = Experience(speeds, runs), speeds
        self._by_size: dict[tuple[str, Size], list[float]] = {}
        self._by_application: dict[str, list[float]] = {}
        self._all: list[float] = []
        for run in runs:
            seconds = run.seconds / self._run_time_factor(run.application, None, run.clusters)
            self._by_size.setdefault((run.application, run.size), []).append(seconds)
            self._by_application.setdefault(run.application, []).append(seconds)
            self._all.append(seconds)

    def run_time(self, job: PlannedJob, gang: Gang) -> float:
        """Return the run time of a placement relative to one cluster of speed 1, as a ``RunTime``."""
        clusters = [cluster for cluster, _ in gang]
        return self._run_time_factor(application_of(job.spec), job.spec.communication, clusters)

    def draw_run_time(self, job: Job, now: float, draws: Random) -> float:
        """Draw a run time in seconds on one cluster of speed 1; for a running job, one that is still possible."""
        spec, attempt = job.spec, job.attempt
        factor, elapsed = 1.0, 0.0
        is_running = job.is_placed and job.ending is None  # the last attempt of a job that is queued again is over
        if is_running and attempt is not None and attempt.barrier_at is not None:
            factor = self._run_time_factor(application_of(spec), spec.communication, [c.cluster for c in attempt.gang])
            elapsed = max(0.0, now - attempt.barrier_at)
        run_times = self._earlier_run_times(spec)
        if len(run_times) < ENOUGH:
            # Fewer runs give only the order of magnitude.
            run_times = (
                [] if spec.walltime is not None else [time * exp(draws.gauss(0.0, FEW_SCATTER)) for time in run_times]
            )
        possible = [seconds * factor for seconds in run_times if seconds * factor > elapsed]
        if possible:
            lasts = draws.choice(possible)
        elif run_times:
            # The job has run longer than any earlier run. Expect a remaining time of the order of the elapsed time.
            lasts = elapsed + draws.expovariate(1 / max(elapsed, 1.0))
        elif spec.walltime is not None:
            lasts = draws.uniform(min(elapsed, spec.walltime), spec.walltime)
        else:
            lasts = elapsed + draws.expovariate(1 / (median(self._all) if self._all else NOTHING_KNOWN))
        if spec.walltime is not None:
            lasts = min(lasts, spec.walltime)
        return lasts / factor

    def describe_basis(self, spec: JobSpec) -> str:
        """Return a text that names the data from which a job's run time is estimated."""
        application, run_times = application_of(spec), self._earlier_run_times(spec)
        if len(run_times) >= ENOUGH or (run_times and spec.walltime is None):
            return f"{len(run_times)} run{'s' * (len(run_times) > 1)} of {application}"
        if spec.walltime is not None:
            return "its walltime"
        return "the runs of other applications" if self._all else "a guess"

    def _earlier_run_times(self, spec: JobSpec) -> list[float]:
        """Return the run times in seconds of the same application and size; of all its sizes if those are too few."""
        application = application_of(spec)
        same = self._by_size.get((application, run_size(spec)), [])
        return same if len(same) >= ENOUGH else self._by_application.get(application, [])

    def _run_time_factor(
        self, application: str, communication: float | None, clusters: Collection[ClusterName]
    ) -> float:
        """Return the run time on these clusters relative to that on one cluster of speed 1.

        The slowest cluster sets the speed, and several clusters add the slowdown estimated for the application.
        ``communication``: the declared fraction of run time for communication; None if it is not declared.
        """
        names = tuple(sorted(set(clusters)))
        speed = min((self._speeds.get(name, 1.0) for name in names), default=1.0)
        if len(names) < 2:
            return 1.0 / speed
        return max(1.0, self._experience.slowdowns(application, communication).on_clusters(names).value) / speed


JOB_RUNS, MIN_DRAWS, MAX_DRAWS = 2_000, 3, 20
"""Target for the total number of simulated jobs; with more jobs there are fewer repetitions, within these bounds."""
LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9
HORIZON = 30 * 86_400.0
"""Default number of simulated seconds."""
ALONE = 4_000
"""Number of simulated jobs up to which one process is used."""
MAX_TASKS = 1_000
"""Number of waiting tasks of arrays that a simulation starts before it ends."""


@dataclass(frozen=True)
class Change:
    """A change to the grid, its rules or its jobs for a what-if forecast. The default changes nothing."""

    policy: str = ""
    """Policy for all waiting jobs with requests that it serves."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    drain: tuple[ClusterName, ...] = ()
    resume: tuple[ClusterName, ...] = ()
    add: Mapping[ClusterName, int] = field(default_factory=dict)
    """Nodes of clusters to add, by name."""
    first: JobId | None = None
    """A waiting job to put before all others of its priority."""
    walltimes: Mapping[JobId, float] = field(default_factory=dict)
    begin: float | None = None
    """When the drains begin, in seconds since the epoch; None: now."""
    end: float | None = None
    """When they end; None: when the clusters are resumed."""

    def __bool__(self) -> bool:
        return self != Change()

    def check(self, moment: Moment, policies: Registry) -> None:
        """Raise ``UsageError`` or ``NotFoundError`` if the change is impossible for this snapshot."""
        names = [cluster.name for cluster in moment.beginning.clusters]
        for field_name in ("drain", "resume"):
            for name in getattr(self, field_name):
                check_cluster(name, names, field_name)
        for name, nodes in self.add.items():
            if name in names:
                hint = "give another name"
                raise UsageError(f"there is a cluster {name} already", field="add", value=name, hint=hint)
            if nodes < 1:
                raise UsageError(f"{name} would have {nodes} nodes", field="add", value=nodes, hint="give 1 or more")
        job_fields = [("walltimes", ident) for ident in self.walltimes]
        if self.first is not None:
            job_fields.append(("first", self.first))
        waiting = {job.id for job in moment.beginning.jobs if job.is_in_queue} if job_fields else frozenset()
        for field_name, ident in job_fields:
            if ident not in waiting:
                hint = "name one that is queued"
                raise UsageError(
                    f"job {ident} is not queued, so {field_name} cannot change it",
                    field=field_name,
                    value=ident,
                    hint=hint,
                )
        if self.policy:
            self._check_policy(moment, policies)
        changed_rules(moment.beginning.rules, self.rules)

    def _check_policy(self, moment: Moment, policies: Registry) -> None:
        """Raise ``UsageError`` if the chosen policy serves none of the waiting jobs."""
        serves = sorted(policies.get(self.policy).serves)
        waiting = [job.spec for job in moment.jobs if job.is_in_queue]
        if waiting and not any(is_served(self.policy, spec, policies) for spec in waiting):
            types = format_list(sorted({spec.request.type for spec in waiting}))
            raise UsageError(
                f"{self.policy} places none of the jobs that wait: it serves {format_list(serves)}, "
                f"and they are {types}",
                field="policy",
                value=self.policy,
                hint=f"name a policy that serves {types} requests",
            )

    def of(self, moment: Moment, policies: Registry) -> Moment:
        """Return the snapshot with the change; raise the errors of ``check``."""
        self.check(moment, policies)
        beginning = moment.beginning
        drain = Drain(moment.now, begins_at=self.begin, ends_at=self.end)
        drained = dict.fromkeys(self.resume) | ({} if self.begin else dict.fromkeys(self.drain, drain))
        planned = dict.fromkeys(self.drain, (drain,)) if self.begin else {}
        clusters = [
            replace(
                cluster,
                drained=drained.get(cluster.name, cluster.drained),
                planned_drains=(*cluster.planned_drains, *planned.get(cluster.name, ())),
            )
            for cluster in beginning.clusters
        ]
        clusters += [KnownCluster(name, total=nodes) for name, nodes in self.add.items()]
        jobs = beginning.jobs
        if self.policy or self.walltimes or self.first is not None:
            first_seq = min((job.queue_seq for job in jobs), default=0)
            jobs = tuple(self._change_job(job, policies, first_seq - 1) for job in jobs)
        rules = changed_rules(beginning.rules, self.rules)
        startup = fmean([nodes.startup for nodes in moment.nodes.values()] or [0.0])
        return Moment(
            replace(beginning, clusters=tuple(clusters), jobs=jobs, rules=rules),
            {**moment.nodes, **{name: NodesNow(nodes, startup=startup) for name, nodes in self.add.items()}},
        )

    def _change_job(self, job: Job, policies: Registry, first: int) -> Job:
        """Return a waiting job with its changed policy, walltime and position; any other job as it is.

        ``first``: the queue number that precedes those of all jobs, for the one to be moved to the front.
        """
        if not job.is_in_queue:
            return job
        spec = job.spec
        if self.policy and is_served(self.policy, spec, policies):
            spec = replace(spec, policy=self.policy, policy_options=())
        if job.id in self.walltimes:
            spec = replace(spec, walltime=self.walltimes[job.id])
        return replace(job, spec=spec, queue_seq=first if job.id == self.first else job.queue_seq)


@dataclass(frozen=True, slots=True)
class Interval:
    """An 80 % interval, in seconds from now: one value in ten is below ``low``, one is above ``high``."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Expected:
    """Forecast of one job."""

    job: JobId
    state: JobState
    """Current state; ``running`` for an array of which a task has started."""
    starts: Interval | None
    """Start time; None if the job has started, or starts in no simulation.

    A simulation in which it does not start counts as a start at the horizon. If that simulation ended before, with the
    maximum number of tasks, the start is None.
    """
    ends: Interval | None
    """End time, with the same exceptions. The end of an array is extrapolated if a simulation ends before it."""
    runs: Interval | None
    """Run time; None if the job has started, or starts and ends in no simulation."""
    not_run: float
    """Fraction of the simulations in which the job did not end before the horizon."""
    basis: str
    """Data from which the run time is estimated."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecasts of all unfinished jobs, by id."""

    at: float
    horizon: float
    """Number of simulated seconds: the least of all simulations."""
    draws: int
    jobs: tuple[Expected, ...]
    mean_wait: Interval | None
    """Mean time from now to the start of the jobs that wait now, of those that start before the horizon."""
    mean_response: Interval | None
    """Mean time from now to their end, of those that end before the horizon."""
    started: Interval | None
    """Number of waiting jobs that start before the horizon."""
    utilisation: float
    note: str = ""
    """Why simulations ended early; empty if none did."""
    there: Mapping[JobId, int] = field(default_factory=dict)
    """The nodes of jobs on planned drained clusters at the begin, if they have them in most simulations."""

    def of(self, ident: JobId) -> Expected | None:
        return next((expected for expected in self.jobs if expected.job == ident), None)


Report = Callable[[int, int], None]
"""Is called with the number of completed simulations and the number of all; with zeros before they begin."""


def ignore_progress(_completed: int, _total: int) -> None:
    """Discard the progress of simulations."""


@dataclass(frozen=True)
class Question:
    """A forecast to compute in another process; ``policies`` is a module-level function, so that it can be imported."""

    moment: Moment
    change: Change
    policies: Callable[[], Registry]
    horizon: float = HORIZON
    max_draws: int = MAX_DRAWS
    report: Report = ignore_progress


@dataclass(frozen=True, slots=True)
class Answer:
    """The forecast without the change, and with it if there is one."""

    as_it_is: Forecast
    changed: Forecast | None


def answer_what_if(question: Question) -> Answer:
    """Return the forecasts of the snapshot as it is and with the change, with the same run times."""
    moment, policies = question.moment, question.policies()
    changes = [Change(), question.change] if question.change else [Change()]
    plans = [_create_plan(moment, change, policies, horizon=question.horizon) for change in changes]
    plans = [replace(plan, draws=min(plan.draws, question.max_draws)) for plan in plans]
    work = sum(plan.count_runs() * plan.draws for plan in plans)
    forecasts = _run_simulations(plans, count_processors() if work > ALONE else 1, question.report)
    return Answer(forecasts[0], forecasts[1] if question.change else None)


def forecast_jobs(
    moment: Moment,
    change: Change | None = None,
    *,
    draws: int | None = None,
    horizon: float = HORIZON,
    seed: int = 0,
    policies: Registry | None = None,
    max_tasks: int = MAX_TASKS,
) -> Forecast:
    """Return the forecast of ``draws`` simulations of ``horizon`` seconds each.

    A simulation ends early once ``max_tasks`` waiting tasks of arrays have started.
    By default there are fewer draws with more jobs. Raise ``UsageError`` for an impossible change. Equal arguments give
    equal results; with and without a change the same run times are drawn.
    """
    plan = _create_plan(moment, change or Change(), policies or builtin_policies(), draws, horizon, seed, max_tasks)
    return _run_simulations([plan], 1)[0]


@dataclass(frozen=True)
class _Plan:
    """The simulations of one forecast."""

    moment: Moment
    """The snapshot, with the change."""
    estimates: RunTimeEstimates
    policies: Registry
    draws: int
    horizon: float
    seed: int
    max_tasks: int
    """Number of waiting tasks of arrays that a simulation starts before it ends."""
    change: Change

    def is_within_horizon(self, time: float | None) -> bool:
        """Return whether an event occurs in a simulation, and at most at the horizon."""
        return time is not None and time <= self.moment.now + self.horizon

    def interval(self, courses: "Sequence[_Course]", times: Sequence[float | None]) -> Interval | None:
        """Return the interval of one event time per simulation, in seconds from now.

        None if it occurs in no simulation before the horizon, or may occur after the end of one that ended early.
        """
        is_unknown = any(time is None and course.is_cut for course, time in zip(courses, times, strict=True))
        if is_unknown or not any(map(self.is_within_horizon, times)):
            return None
        return _percentile_interval(
            self.horizon if time is None else min(self.horizon, max(0.0, time - self.moment.now)) for time in times
        )

    @property
    def waiting_tasks(self) -> int:
        """Return the number of tasks of arrays that were never started."""
        return sum(job.tasks.waiting for job in self.moment.jobs if job.tasks is not None)

    def count_runs(self) -> int:
        """Return the number of jobs and tasks that one simulation runs at most."""
        return len(self.moment.jobs) + min(self.waiting_tasks, self.max_tasks)


@dataclass(frozen=True, slots=True)
class _Course:
    """The result of one simulation."""

    simulated_s: float
    """Number of simulated seconds."""
    is_cut: bool
    """Whether the simulation ended before the horizon, with the maximum number of tasks."""
    starts: dict[JobId, float]
    """Start times of the jobs that started in it."""
    ends: dict[JobId, float]
    """End times of the jobs that ended, and extrapolated ones of arrays."""
    utilisation: float
    there: dict[JobId, int]
    """The nodes of jobs on planned drained clusters at the begin."""


def _create_plan(
    moment: Moment,
    change: Change,
    policies: Registry,
    draws: int | None = None,
    horizon: float = HORIZON,
    seed: int = 0,
    max_tasks: int = MAX_TASKS,
) -> _Plan:
    """Prepare the simulations of a forecast for a snapshot with a change. Raise ``UsageError`` if either is invalid.

    ``draws``: the number of simulations; None: chosen by the number of jobs. ``horizon`` is in seconds.
    """
    changed = _without_node_properties(change.of(moment, policies))
    missing = sorted({job.spec.policy for job in changed.jobs if job.spec.policy} - set(policies.names()))
    if missing:
        hint = "install the package that it comes with"
        raise UsageError(f"there is no policy {format_list(missing)} here", field="policy", value=missing[0], hint=hint)
    estimates = RunTimeEstimates(
        moment.beginning.runs, {cluster.name: cluster.speed for cluster in changed.beginning.clusters}
    )
    plan = _Plan(changed, estimates, policies, draws or MAX_DRAWS, horizon, seed, max_tasks, change)
    number = max(MIN_DRAWS, min(MAX_DRAWS, JOB_RUNS // max(1, plan.count_runs())))
    return plan if draws else replace(plan, draws=number)


def _without_node_properties(moment: Moment) -> Moment:
    """Return the snapshot with jobs that run on any node, since simulated nodes have no GPUs, features or partitions.

    The forecast is optimistic for jobs that require them.
    """
    jobs = tuple(_on_any_node(job) for job in moment.beginning.jobs)
    return replace(moment, beginning=replace(moment.beginning, jobs=jobs))


def _on_any_node(job: Job) -> Job:
    """Return a job without the properties of nodes that the simulation does not know."""
    if not job.spec.node_requirements:
        return job
    unknown: dict[str, Any] = {"gpus": None, "features": (), "partition": ""}
    spec = replace(job.spec, **unknown)
    if not isinstance(spec.request, FlexibleRequest):
        components = tuple(replace(component, **unknown) for component in spec.request.components)
        spec = replace(spec, request=replace(spec.request, components=components))
    return replace(job, spec=spec)


def _run_simulations(plans: Sequence[_Plan], processes: int, report: Report = ignore_progress) -> list[Forecast]:
    """Run the simulations of all plans in up to ``processes`` processes, and return one forecast for each plan."""
    simulations = [(plan, draw) for plan in plans for draw in range(plan.draws)]
    courses: list[_Course] = []
    report(0, len(simulations))
    for course in forked_map(_run_simulation, simulations, processes, _Course):
        courses.append(course)
        report(len(courses), len(simulations))
    remaining = iter(courses)
    return [_summarize_courses(plan, list(islice(remaining, plan.draws))) for plan in plans]


def _run_simulation(planned: tuple[_Plan, int]) -> _Course:
    """Run one simulation of a plan, and return when its jobs start and end.

    ``planned``: the plan, and the number of the simulation, which seeds the random run times.
    """
    plan, draw = planned
    moment = plan.moment
    plans = {
        job.id: PlannedJob(
            max(0.0, job.submitted_at),
            job.spec,
            plan.estimates.draw_run_time(job, moment.now, Random(f"{plan.seed}/{draw}/{job.id}")),
        )
        for job in moment.jobs
    }
    simulation = Simulation(
        moment.create_grid(),
        run_time=plan.estimates.run_time,
        policies=plan.policies,
        until=moment.now + plan.horizon,
        moment=moment,
        known=plans,
        max_tasks=plan.max_tasks if plan.waiting_tasks > plan.max_tasks else None,
    )
    outcome = simulation.run(())
    unfinished = list(simulation.scheduler.queries.jobs())
    starts = {job.id: job.started_at for job in unfinished if job.started_at is not None}
    starts |= {job.ident: job.started for job in outcome.jobs if job.started is not None}
    ends = {job.ident: job.ended for job in outcome.jobs}
    is_cut = simulation.has_started_max_tasks
    if is_cut:
        ends |= _extrapolate_ends(moment, unfinished, simulation.now)
    simulated_s = simulation.now - moment.now if is_cut else plan.horizon
    node_counts: dict[JobId, int] = {}
    if (begin := plan.change.begin) is not None:
        gangs = {job.ident: job.gang for job in outcome.jobs}
        placed = [(job.id, job.attempt) for job in unfinished if job.is_placed and job.attempt is not None]
        gangs |= {ident: [(c.cluster, c.size) for c in attempt.gang] for ident, attempt in placed}
        for ident, gang in gangs.items():
            nodes = sum(size for name, size in gang if name in plan.change.drain)
            if nodes and starts.get(ident, inf) <= begin < ends.get(ident, inf):
                node_counts[ident] = nodes
    starts = {ident: time for ident, time in starts.items() if time >= moment.now}  # others are of earlier attempts
    return _Course(simulated_s, is_cut, starts, ends, outcome.utilisation, node_counts)


def _extrapolate_ends(moment: Moment, unfinished: Iterable[Job], until: float) -> dict[JobId, float]:
    """Return the end times of unfinished arrays if their tasks go on to end at the rate of the simulation.

    ``until``: the time at which the simulation ended. Arrays of which no task has ended are left out.
    """
    tasks_by_job = {job.id: job.tasks for job in moment.jobs}
    ends = {}
    for job in unfinished:
        tasks, tasks_before = job.tasks, tasks_by_job.get(job.id)
        if tasks is None or tasks_before is None:
            continue
        remaining = tasks.waiting + tasks.live
        if (ended := tasks_before.waiting + tasks_before.live - remaining) > 0:
            end = until + remaining * (until - moment.now) / ended
            ends[job.id] = end if job.spec.deadline is None else max(until, min(end, job.spec.deadline))
    return ends


def _summarize_courses(plan: _Plan, courses: Sequence[_Course]) -> Forecast:
    """Summarize the simulations of a plan as intervals of the start and end of each job."""
    now, jobs = plan.moment.now, plan.moment.jobs
    states = {job.id: _state_of(job) for job in jobs}
    waiting = [ident for ident, state in states.items() if state is JobState.QUEUED]
    expected = []
    for job in sorted(jobs, key=lambda job: job.id):
        starts = [course.starts.get(job.id) for course in courses]
        ends = [course.ends.get(job.id) for course in courses]
        is_waiting = states[job.id] is JobState.QUEUED
        ran = [(start, end) for start, end in zip(starts, ends, strict=True) if start is not None and end is not None]
        expected.append(
            Expected(
                job.id,
                states[job.id],
                plan.interval(courses, starts) if is_waiting else None,
                plan.interval(courses, ends),
                _percentile_interval(end - start for start, end in ran) if is_waiting else None,
                sum(not plan.is_within_horizon(end) for end in ends) / len(courses),
                plan.estimates.describe_basis(job.spec),
            )
        )
    starts_of_waiting = [[course.starts[ident] for ident in waiting if ident in course.starts] for course in courses]
    ends_of_waiting = [
        [course.ends[ident] for ident in waiting if plan.is_within_horizon(course.ends.get(ident))]
        for course in courses
    ]
    cut = (
        f"only the first {plan.max_tasks:,} of {plan.waiting_tasks:,} waiting tasks of arrays are simulated; the ends "
        "of arrays are extrapolated"
    )
    counts = Counter(ident for course in courses for ident in course.there)
    node_counts = {ident: nodes for course in courses for ident, nodes in course.there.items()}
    return Forecast(
        now,
        min(course.simulated_s for course in courses),
        len(courses),
        tuple(expected),
        _percentile_interval(fmean(times) - now for times in starts_of_waiting if times),
        _percentile_interval(fmean(times) - now for times in ends_of_waiting if times),
        _percentile_interval(len(times) for times in starts_of_waiting) if waiting else None,
        fmean(course.utilisation for course in courses),
        cut if any(course.is_cut for course in courses) else "",
        {ident: nodes for ident, nodes in node_counts.items() if 2 * counts[ident] > len(courses)},
    )


def _state_of(job: Job) -> JobState:
    """Return the state of a job; that of an array is ``queued`` only until its first task starts."""
    has_started = job.state is JobState.QUEUED and job.tasks is not None and job.started_at is not None
    return JobState.RUNNING if has_started else job.state


def _percentile_interval(values: Iterable[float]) -> Interval | None:
    """Return the 10th, 50th and 90th percentiles; None without values."""
    ordered = sorted(values)
    return Interval(*(_interpolate_quantile(ordered, part) for part in (LOW, MIDDLE, HIGH))) if ordered else None


def _interpolate_quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile by linear interpolation.

    It never decreases with ``part``, as it may by rounding in ``statistics.quantiles``.
    """
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def changed_rules(rules: Rules, changes: Mapping[str, Any]) -> Rules:
    """Return the rules with changed parameters; raise ``UsageError`` for unknown parameters and invalid values."""
    values = asdict(rules)
    for name in changes.keys() - values.keys():
        raise UsageError(
            f"there is no rule {name}", field=f"rules.{name}", value=name, hint=suggest_names(name, values)
        )
    try:
        changed: Rules = TypeAdapter(Rules).validate_python(values | dict(changes))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else next(iter(changes), "")
        raise UsageError(
            f"{name} cannot be {changes.get(name)!r}: {first['msg']}", field=f"rules.{name}", value=changes.get(name)
        ) from error
    return changed


def is_served(policy: str, spec: JobSpec, policies: Registry) -> bool:
    """Return whether a policy serves the type of a job's request; raise ``UsageError`` if there is no such policy."""
    return spec.request.type in policies.get(policy).serves
