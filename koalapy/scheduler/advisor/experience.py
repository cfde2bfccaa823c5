"""What the scheduler has learned of applications: how long they ran, by size and clusters (semantics 9)."""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, log

from koalapy.model.advice import Run, Size, completed_run_of, run_size
from koalapy.model.application import application_of
from koalapy.model.job import Job, JobSpec
from koalapy.model.request import ClusterName
from koalapy.policies.knowledge import BETWEEN_APPLICATIONS, RunTimes, Slowdowns, Where, assumed
from koalapy.policies.log_normal import LogNormal, combine, separate, spread_of
from koalapy.scheduler.advisor.run_time_fit import MAX_DEVIATION, SINGLE_CLUSTER, Fit, RunSample, fit

MAX_RETAINED_RUNS = 50
"""So many of the last runs of an application count, for each size and set of clusters."""
MAX_RETAINED_GROUPS = 200
"""Sizes on sets of clusters, of one application; those seen last."""
MAX_RETAINED_APPLICATIONS = 2000
MAX_RETAINED_ANSWERS = 500
MAX_POOLED_APPLICATIONS = 200
"""Applications seen last, by which others are judged of which nothing is known."""
MIN_RUN_SECONDS = 1e-3
"""Seconds: what is shorter counts as this."""
APPLICATIONS_WEIGHT = 2.0
"""Of how many applications what is assumed of the differences between them has the weight."""
MIN_DIFFERENCE = 0.1
"""Between applications: the standard deviation of the logarithms of their slowdowns is not taken to be less."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Runs of one size on one set of clusters, none where it was a single one; seconds at speed 1."""

    size: Size
    where: Where
    runs: int
    killed: int
    """Of the runs, before their end."""
    seconds: LogNormal


class ApplicationRuns:
    """The runs of one application."""

    def __init__(self) -> None:
        self.groups: OrderedDict[tuple[Size, Where], deque[RunSample]] = OrderedDict()
        self.single_cluster_runs = 0
        """Runs on one cluster since the last one on several."""
        self._fit: Fit | None = None
        self._own_slowdown: list[LogNormal] | None = None
        self._answers: dict[object, tuple[Slowdowns, RunTimes]] = {}

    def add(self, size: Size, where: Where, ran: RunSample) -> None:
        key = (size, where)
        self.groups.setdefault(key, deque(maxlen=MAX_RETAINED_RUNS)).append(ran)
        self.groups.move_to_end(key)
        if len(self.groups) > MAX_RETAINED_GROUPS:
            self.groups.popitem(last=False)
        self.single_cluster_runs = 0 if where else self.single_cluster_runs + 1
        self._fit = self._own_slowdown = None
        self._answers.clear()

    @property
    def fit(self) -> Fit:
        if self._fit is None:
            self._fit = fit(self.groups, assumed())
        return self._fit

    @property
    def own_slowdown(self) -> LogNormal | None:
        """What its own runs alone say of its slowdown."""
        if self._own_slowdown is None:
            told = self.fit.observed_slowdowns()
            self._own_slowdown = [combine(told)] if told else []
        return self._own_slowdown[0] if self._own_slowdown else None

    def slowdowns(self, prior: LogNormal) -> Slowdowns:
        known = {size for size, where in self.groups if where == SINGLE_CLUSTER}
        compared = [ran for (size, where), ran in self.groups.items() if where and size in known]
        killed = sum(run.killed for ran in compared for run in ran)
        return replace(self.fit.slowdowns(prior), runs=sum(map(len, compared)), killed=killed)

    def times(self, size: Size, slowdowns: Slowdowns) -> RunTimes:
        alone = self.fit.single_cluster_time(size, slowdowns)
        if alone is None or alone.deviation > MAX_DEVIATION:
            return RunTimes()
        seen = {
            where: self.fit.multi_cluster_time(size, where, alone, slowdowns)
            for each, where in self.groups
            if each == size and where
        }
        return RunTimes(alone, seen)

    def answer(self, size: Size, prior: LogNormal) -> tuple[Slowdowns, RunTimes]:
        """Of a job of a size; asked again and again while it waits."""
        key = (size, prior)
        known = self._answers.get(key)
        if known is None:
            if len(self._answers) >= MAX_RETAINED_ANSWERS:
                self._answers.clear()
            slowdowns = self.slowdowns(prior)
            known = self._answers[key] = slowdowns, self.times(size, slowdowns)
        return known


class Experience:
    """The runs of all applications, of bounded size: of each the last ones, and those applications seen last."""

    def __init__(self, speeds: Mapping[ClusterName, float] | None = None, runs: Iterable[Run] = ()) -> None:
        """``runs`` from the oldest to the newest; ``speeds`` of clusters, 1 where none is given."""
        self._speeds = speeds or {}
        self._applications: OrderedDict[str, ApplicationRuns] = OrderedDict()
        self._pool: Pool | None = None
        self._first_seen: set[str] = set()
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        """Take in a run."""
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
        """Take in a job that is over, if it tells something."""
        if (run := completed_run_of(job)) is None:
            return
        if not self.knows(run.application):
            self._first_seen.add(run.application)
        self.add(run)

    def take_first_seen(self) -> set[str]:
        """The applications of which the first run was learned since this was last called."""
        first_seen = self._first_seen
        if first_seen:
            self._first_seen = set()
        return first_seen

    def _speed(self, clusters: Collection[ClusterName]) -> float:
        """That of the slowest, for which the others wait."""
        return min((self._speeds.get(name, 1.0) for name in clusters), default=1.0)

    # What it says

    def shape(self, spec: JobSpec) -> tuple[object, ...]:
        """Return what its answers on a job depend on beside request and inputs; all unknown applications are alike."""
        application = application_of(spec)
        return (application if self.knows(application) else "", spec.processes_per_node, spec.communication)

    def knows(self, application: str) -> bool:
        """Whether a run of it was seen."""
        return application in self._applications

    def applications(self) -> list[str]:
        return sorted(self._applications)

    def runs(self) -> Iterator[Run]:
        """All that it keeps, as at speed 1: another with the same speeds would learn the same of them."""
        for name, application_runs in self._applications.items():
            for (size, where), group in application_runs.groups.items():
                speed = self._speed(where)
                for ran in group:
                    yield Run(name, size, where, exp(ran.log) / speed, ran.killed)

    def seen(self, application: str) -> list[RunSummary]:
        """By size and clusters."""
        application_runs = self._applications.get(application)
        if application_runs is None:
            return []
        found = []
        for size, where in sorted(application_runs.groups, key=lambda key: (key[0], len(key[1]), key[1])):
            ran = application_runs.groups[size, where]
            seconds = application_runs.fit.groups[size, where].belief(application_runs.fit.scatter)
            found.append(RunSummary(size, where, len(ran), sum(run.killed for run in ran), seconds))
        return found

    def single_cluster_runs(self, application: str) -> int:
        """How often it ran on one cluster since it last ran on several."""
        application_runs = self._applications.get(application)
        return 0 if application_runs is None else application_runs.single_cluster_runs

    def answer(self, application: str, size: Size, communication: float | None = None) -> tuple[Slowdowns, RunTimes]:
        """Its slowdowns, and how long a job of that size runs at speed 1."""
        prior = self._prior(application, communication)
        application_runs = self._applications.get(application)
        return (Slowdowns(prior), RunTimes()) if application_runs is None else application_runs.answer(size, prior)

    def slowdowns(self, application: str, communication: float | None = None) -> Slowdowns:
        """How many times longer it runs on several clusters."""
        return self.answer(application, Size(1), communication)[0]

    def expected(self, spec: JobSpec, clusters: Collection[ClusterName]) -> float | None:
        """Seconds from the opened barrier to the end of a job on these clusters; None when nothing is known."""
        slowdowns, times = self.answer(application_of(spec), run_size(spec), spec.communication)
        where = tuple(sorted(clusters))
        found = times.alone if len(where) < 2 else times.on(where, slowdowns.on(where))
        return None if found is None else found.value / self._speed(clusters)

    def _prior(self, application: str, communication: float | None) -> LogNormal:
        """What is believed before its own runs: what it declares, or else what other applications do here."""
        if communication is not None:
            return assumed(communication)
        if self._pool is None:
            last = islice(reversed(self._applications.items()), MAX_POOLED_APPLICATIONS)
            told = {name: own for name, application_runs in last if (own := application_runs.own_slowdown) is not None}
            self._pool = Pool(told)
        return self._pool.prior_for(application)


class Pool:
    """What the slowdowns of all applications say of one that is not known yet."""

    def __init__(self, told: Mapping[str, LogNormal]) -> None:
        self._beliefs = told
        usual = LogNormal(assumed().log, BETWEEN_APPLICATIONS)
        center = combine([usual, *(belief.times(LogNormal(0.0, BETWEEN_APPLICATIONS)) for belief in told.values())])
        spread = spread_of(told.values(), center.log, BETWEEN_APPLICATIONS, APPLICATIONS_WEIGHT)
        self._between = LogNormal(0.0, max(MIN_DIFFERENCE, spread))
        self._all = combine([usual, *(belief.times(self._between) for belief in told.values())])

    def prior_for(self, application: str) -> LogNormal:
        """Of an application, by all others."""
        own, found = self._beliefs.get(application), self._all
        if own is not None:
            found = separate(found, own.times(self._between))
        return found.times(self._between)
