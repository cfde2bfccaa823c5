"""What the scheduler has learned of applications: how long they ran, by size and number of clusters (semantics 9)."""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import log
from statistics import median

from koalapy.model.advice import Run, Size, run_of, size_of
from koalapy.model.application import application_of
from koalapy.model.job import Job, JobSpec
from koalapy.model.request import ClusterName
from koalapy.placement.knowledge import Estimate, Ratio, RunTimes, slowdown

KEPT_RUNS = 50
"""So many of the last runs of an application count, for each size and number of clusters."""
KEPT_SIZES = 200
KEPT_APPLICATIONS = 2000
SHORTEST = 1e-3
"""Seconds: what is shorter says nothing of slowdowns."""

Times = deque[float]
"""Seconds as they would have been at speed 1."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Runs of one size on one number of clusters; ``seconds`` is their median at speed 1."""

    size: Size
    clusters: int
    runs: int
    seconds: float


class Book:
    """The runs of one application."""

    def __init__(self) -> None:
        self.times: OrderedDict[Size, dict[int, Times]] = OrderedDict()
        self._ratios: tuple[Ratio, ...] | None = None
        self._medians: dict[tuple[Size, int], float] = {}

    def add(self, size: Size, clusters: int, seconds: float) -> None:
        self.times.setdefault(size, {}).setdefault(clusters, deque(maxlen=KEPT_RUNS)).append(seconds)
        self.times.move_to_end(size)
        self._ratios = None
        self._medians.pop((size, clusters), None)
        if len(self.times) > KEPT_SIZES:
            gone, by_clusters = self.times.popitem(last=False)
            for count in by_clusters:
                self._medians.pop((gone, count), None)

    def typical(self, size: Size, clusters: int) -> float:
        """The median of the runs of a size on so many clusters, of which there are some."""
        known = self._medians.get((size, clusters))
        if known is None:
            known = self._medians[size, clusters] = median(self.times[size][clusters])
        return known

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """Runs on several clusters held against those of the same size on one."""
        if self._ratios is None:
            self._ratios = tuple(self._compare())
        return self._ratios

    def _compare(self) -> Iterable[Ratio]:
        for size, by_clusters in self.times.items():
            if 1 not in by_clusters or (alone := self.typical(size, 1)) < SHORTEST:
                continue
            for clusters, times in sorted(by_clusters.items()):
                if clusters > 1 and (together := self.typical(size, clusters)) >= SHORTEST:
                    single, several = len(by_clusters[1]), len(times)
                    weight = single * several / (single + several)
                    yield Ratio(clusters, log(together / alone), weight, several)


class Experience:
    """The books of all applications, of bounded size: of each the last runs, and those applications seen last."""

    def __init__(self, speeds: Mapping[ClusterName, float] | None = None, runs: Iterable[Run] = ()) -> None:
        """``runs`` from the oldest to the newest; ``speeds`` of clusters, 1 where none is given."""
        self._speeds = speeds or {}
        self._books: OrderedDict[str, Book] = OrderedDict()
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        """Take in a run."""
        book = self._books.setdefault(run.application, Book())
        book.add(run.size, len(run.clusters), run.seconds * self._speed(run.clusters))
        self._books.move_to_end(run.application)
        if len(self._books) > KEPT_APPLICATIONS:
            self._books.popitem(last=False)

    def learn(self, job: Job) -> str:
        """Take in a job that is over, which tells something if it succeeded; its application, if that is a new one."""
        run = run_of(job)
        if run is None:
            return ""
        met = "" if self.knows(run.application) else run.application
        self.add(run)
        return met

    def _speed(self, clusters: Collection[ClusterName]) -> float:
        """That of the slowest, for which the others wait."""
        return min((self._speeds.get(name, 1.0) for name in clusters), default=1.0)

    # What it says

    def knows(self, application: str) -> bool:
        """Whether a run of it was seen."""
        return application in self._books

    def applications(self) -> list[str]:
        return sorted(self._books)

    def seen(self, application: str) -> list[Seen]:
        """By size and number of clusters."""
        book = self._books.get(application, Book())
        return [
            Seen(size, clusters, len(times), book.typical(size, clusters))
            for size, by_clusters in sorted(book.times.items()) for clusters, times in sorted(by_clusters.items())
        ]  # fmt: skip

    def ratios(self, application: str) -> tuple[Ratio, ...]:
        book = self._books.get(application)
        return book.ratios if book else ()

    def times(self, application: str, size: Size, communication: float | None = None) -> RunTimes:
        """How long it runs at speed 1, by runs of this size, or else of the nearest one."""
        book = self._books.get(application)
        if book is None:
            return RunTimes()
        known = size if size in book.times else min(book.times, key=lambda other: (_apart(size, other), other))
        by_clusters = {
            count: Estimate(book.typical(known, count), len(runs)) for count, runs in book.times[known].items()
        }
        exact = known == size
        alone = by_clusters.get(1)
        if alone is None:
            # Never on one cluster: what it took on the number where it ran most, less the slowdown there.
            count, most = max(by_clusters.items(), key=lambda pair: (pair[1].runs, -pair[0]))
            alone = Estimate(most.seconds / slowdown(book.ratios, count, communication), most.runs)
        return RunTimes(replace(alone, exact=exact), by_clusters if exact else {})

    def expected(self, spec: JobSpec, clusters: Collection[ClusterName]) -> float | None:
        """Seconds from the opened barrier to the end of a job on these clusters; None when nothing is known."""
        application = application_of(spec)
        times = self.times(application, size_of(spec), spec.communication)
        seconds = times.on(len(clusters), slowdown(self.ratios(application), len(clusters), spec.communication))
        return None if seconds is None else seconds / self._speed(clusters)


def _apart(one: Size, other: Size) -> float:
    """How different two sizes are: another number of processes on each node is as much as e times the nodes."""
    return abs(log(one.nodes / other.nodes)) + (one.per_node != other.per_node)
