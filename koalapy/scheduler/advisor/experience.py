"""Store the run times of applications by size and clusters (semantics 9)."""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, hypot, log

from koalapy.model.advice import Run, Size, completed_run_of, run_size
from koalapy.model.application import application_of
from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName
from koalapy.policies.knowledge import (
    BETWEEN_APPLICATIONS,
    ClusterSet,
    LogNormal,
    RunTimes,
    Slowdowns,
    assume_slowdown,
    combine_estimates,
    remove_estimate,
    spread_of,
)
from koalapy.scheduler.advisor.run_time_fit import MAX_DEVIATION, SINGLE_CLUSTER, Fit, RunSample, fit

MAX_RETAINED_RUNS = 50
"""Number of latest runs of an application that are stored for each size and set of clusters."""
MAX_RETAINED_GROUPS = 200
"""Number of most recent combinations of size and clusters that are stored per application."""
MAX_RETAINED_APPLICATIONS = 2000
MAX_RETAINED_ANSWERS = 500
MAX_POOLED_APPLICATIONS = 200
"""Number of most recent applications from which the prior of an unknown one is estimated."""
MIN_RUN_SECONDS = 1e-3
"""Minimum run time in seconds. Shorter runs count as this long."""
APPLICATIONS_WEIGHT = 2.0
"""The weight of the assumed differences between applications, as a number of applications."""
MIN_DIFFERENCE = 0.1
"""The lower bound of the standard deviation, over applications, of the logarithms of their slowdowns."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Statistics of the runs of one size on one set of clusters (empty: one cluster), in seconds at speed 1."""

    size: Size
    where: ClusterSet
    runs: int
    killed: int
    """The runs killed before their end."""
    seconds: LogNormal


class ApplicationRuns:
    """The runs of one application."""

    def __init__(self) -> None:
        self.groups: OrderedDict[tuple[Size, ClusterSet], deque[RunSample]] = OrderedDict()
        self.single_cluster_runs = 0
        """Runs on one cluster since the last one on several."""
        self._fit: Fit | None = None
        self._own_slowdown: list[LogNormal] | None = None
        self._answers: dict[object, tuple[Slowdowns, RunTimes]] = {}

    def add(self, size: Size, clusters: ClusterSet, ran: RunSample) -> None:
        """Store a run, drop the oldest ones above the limits, and discard the estimates made without it.

        ``clusters``: empty for a run on one cluster.
        """
        key = (size, clusters)
        self.groups.setdefault(key, deque(maxlen=MAX_RETAINED_RUNS)).append(ran)
        self.groups.move_to_end(key)
        if len(self.groups) > MAX_RETAINED_GROUPS:
            self.groups.popitem(last=False)
        self.single_cluster_runs = 0 if clusters else self.single_cluster_runs + 1
        self._fit = self._own_slowdown = None
        self._answers.clear()

    @property
    def fit(self) -> Fit:
        if self._fit is None:
            self._fit = fit(self.groups, assume_slowdown())
        return self._fit

    @property
    def own_slowdown(self) -> LogNormal | None:
        """Return the slowdown estimated from the runs of this application; None without comparable ones."""
        if self._own_slowdown is None:
            beliefs = self.fit.observed_slowdowns()
            self._own_slowdown = [combine_estimates(beliefs)] if beliefs else []
        return self._own_slowdown[0] if self._own_slowdown else None

    def slowdowns(self, prior: LogNormal) -> Slowdowns:
        """Return the slowdowns on several clusters, estimated from ``prior`` and the runs.

        They include the number of runs with sizes that also ran on one cluster, and of killed ones.
        """
        single_cluster_sizes = {size for size, clusters in self.groups if clusters == SINGLE_CLUSTER}
        compared = [ran for (size, clusters), ran in self.groups.items() if clusters and size in single_cluster_sizes]
        killed = sum(run.killed for ran in compared for run in ran)
        return replace(self.fit.slowdowns(prior), runs=sum(map(len, compared)), killed=killed)

    def times(self, size: Size, slowdowns: Slowdowns) -> RunTimes:
        """Return the estimated run times of a size, on one cluster and on each measured set of several.

        They are empty if the estimate for one cluster is missing or too uncertain.
        """
        alone = self.fit.single_cluster_time(size, slowdowns)
        if alone is None or alone.deviation > MAX_DEVIATION:
            return RunTimes()
        multi_cluster_times = {
            clusters: self.fit.multi_cluster_time(size, clusters, alone, slowdowns)
            for measured_size, clusters in self.groups
            if measured_size == size and clusters
        }
        return RunTimes(alone, multi_cluster_times)

    def answer(self, size: Size, prior: LogNormal) -> tuple[Slowdowns, RunTimes]:
        """Return the slowdowns and run times of a size; cached, as waiting jobs ask repeatedly."""
        key = (size, prior)
        cached = self._answers.get(key)
        if cached is None:
            if len(self._answers) >= MAX_RETAINED_ANSWERS:
                self._answers.clear()
            slowdowns = self.slowdowns(prior)
            cached = self._answers[key] = slowdowns, self.times(size, slowdowns)
        return cached


class Experience:
    """The latest runs of the latest applications, of bounded size."""

    def __init__(self, speeds: Mapping[ClusterName, float] | None = None, runs: Iterable[Run] = ()) -> None:
        """``runs`` from the oldest to the newest; ``speeds`` of clusters, default 1."""
        self._speeds = speeds or {}
        self._applications: OrderedDict[str, ApplicationRuns] = OrderedDict()
        self._pool: Pool | None = None
        self._first_seen: set[str] = set()
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        """Store a run."""
        application_runs = self._applications.setdefault(run.application, ApplicationRuns())
        seconds = max(MIN_RUN_SECONDS, run.seconds * self._speed(run.clusters))
        application_runs.add(
            run.size, run.clusters if len(run.clusters) > 1 else SINGLE_CLUSTER, RunSample(log(seconds), run.killed)
        )
        self._applications.move_to_end(run.application)
        self._pool = None
        if len(self._applications) > MAX_RETAINED_APPLICATIONS:
            self._applications.popitem(last=False)

    def learn(self, job: Job) -> None:
        """Store the run of a finished job, if it is usable."""
        if (run := completed_run_of(job)) is None:
            return
        if not self.knows(run.application):
            self._first_seen.add(run.application)
        self.add(run)

    def take_first_seen(self) -> set[str]:
        """Return the applications of which the first run was stored since the last call."""
        first_seen = self._first_seen
        if first_seen:
            self._first_seen = set()
        return first_seen

    def _speed(self, clusters: Collection[ClusterName]) -> float:
        """Return the speed of the slowest cluster, for which the others wait."""
        return min((self._speeds.get(name, 1.0) for name in clusters), default=1.0)

    # Statistics

    def shape(self, spec: JobSpec) -> tuple[object, ...]:
        """Return the properties of a job on which its statistics depend, besides request and inputs. They are equal for
        all unknown applications."""
        application = application_of(spec)
        return (application if self.knows(application) else "", spec.processes_per_node, spec.communication)

    def knows(self, application: str) -> bool:
        """Return whether a run of an application is stored."""
        return application in self._applications

    def applications(self) -> list[str]:
        return sorted(self._applications)

    def runs(self) -> Iterator[Run]:
        """Yield all stored runs, as the constructor takes them."""
        for name, application_runs in self._applications.items():
            for (size, clusters), group in application_runs.groups.items():
                speed = self._speed(clusters)
                for ran in group:
                    yield Run(name, size, clusters, exp(ran.log) / speed, ran.killed)

    def seen(self, application: str) -> list[RunSummary]:
        """Return the run statistics of an application, by size and clusters."""
        application_runs = self._applications.get(application)
        if application_runs is None:
            return []
        summaries = []
        for size, clusters in sorted(application_runs.groups, key=lambda key: (key[0], len(key[1]), key[1])):
            ran = application_runs.groups[size, clusters]
            seconds = application_runs.fit.groups[size, clusters].belief(application_runs.fit.scatter)
            summaries.append(RunSummary(size, clusters, len(ran), sum(run.killed for run in ran), seconds))
        return summaries

    def single_cluster_runs(self, application: str) -> int:
        """Return how often an application ran on one cluster since it last ran on several."""
        application_runs = self._applications.get(application)
        return 0 if application_runs is None else application_runs.single_cluster_runs

    def answer(self, application: str, size: Size, communication: float | None = None) -> tuple[Slowdowns, RunTimes]:
        """Return an application's slowdowns, and the run time of its jobs of a size at speed 1."""
        prior = self._prior(application, communication)
        application_runs = self._applications.get(application)
        return (Slowdowns(prior), RunTimes()) if application_runs is None else application_runs.answer(size, prior)

    def slowdowns(self, application: str, communication: float | None = None) -> Slowdowns:
        """Return an application's slowdowns on several clusters."""
        return self.answer(application, Size(1), communication)[0]

    def expected(self, spec: JobSpec, clusters: Collection[ClusterName]) -> float | None:
        """Return the expected run time of a job on these clusters in seconds; None if unknown."""
        slowdowns, times = self.answer(application_of(spec), run_size(spec), spec.communication)
        names = tuple(sorted(clusters))
        run_time = times.single_cluster if len(names) < 2 else times.on_clusters(names, slowdowns.on_clusters(names))
        return None if run_time is None else run_time.value / self._speed(clusters)

    def expected_at_most(self, spec: JobSpec) -> float | None:
        """Return the run time that nine of ten jobs like this one do not exceed; None if unknown."""
        runs = self._applications.get(application_of(spec))
        time = None if runs is None else self.answer(application_of(spec), run_size(spec))[1].single_cluster
        if runs is None or time is None:
            return None
        return LogNormal(time.log, hypot(time.deviation, runs.fit.scatter)).high

    def _prior(self, application: str, communication: float | None) -> LogNormal:
        """Return the slowdown assumed before an application has run on several clusters.

        ``communication``: the declared fraction of run time spent on it; None: estimate from other applications.
        """
        if communication is not None:
            return assume_slowdown(communication)
        if self._pool is None:
            last = islice(reversed(self._applications.items()), MAX_POOLED_APPLICATIONS)
            slowdowns = {
                name: slowdown
                for name, application_runs in last
                if (slowdown := application_runs.own_slowdown) is not None
            }
            self._pool = Pool(slowdowns)
        return self._pool.prior_for(application)


class Pool:
    """The slowdowns of all applications, as the prior of an unknown one."""

    def __init__(self, slowdowns: Mapping[str, LogNormal]) -> None:
        self._beliefs = slowdowns
        usual = LogNormal(assume_slowdown().log, BETWEEN_APPLICATIONS)
        center = combine_estimates(
            [usual, *(belief.multiply_by(LogNormal(0.0, BETWEEN_APPLICATIONS)) for belief in slowdowns.values())]
        )
        spread = spread_of(slowdowns.values(), center.log, BETWEEN_APPLICATIONS, APPLICATIONS_WEIGHT)
        self._between = LogNormal(0.0, max(MIN_DIFFERENCE, spread))
        self._all = combine_estimates([usual, *(belief.multiply_by(self._between) for belief in slowdowns.values())])

    def prior_for(self, application: str) -> LogNormal:
        """Return the prior of an application, from all others."""
        slowdown, belief = self._beliefs.get(application), self._all
        if slowdown is not None:
            belief = remove_estimate(belief, slowdown.multiply_by(self._between))
        return belief.multiply_by(self._between)
