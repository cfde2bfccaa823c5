"""Is every site better off in the grid? Its own users' response times there, and alone on their home site's nodes.

Alone is simulated: the same jobs come at the same moments with the same sizes, and last as long as they really did, by
the speeds of where they were and of home.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from random import Random
from statistics import fmean

from koalapy.model.history import EndedJob
from koalapy.model.job import JobId, JobSpec, JobState, Launcher, Priority
from koalapy.model.request import ClusterName, ComponentRequest, NonFixedRequest
from koalapy.scheduler.rules import Rules
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.simulation import Simulation

MAX_NAMED = 100
"""Jobs of one reason that are named."""
SLACK, SLACK_SHARE = 1.0, 0.01
"""Seconds, and the share of the time alone, within which two means are the same: whether a job is placed at once or
half a second later, as by the daemon's own ways, is nobody's gain."""

SMALLEST_SAMPLE = 10
"""Values below which no interval is given."""
MIN_BLOCKS, MAX_BLOCKS = 10, 500
BLOCK_LENGTHS = (86400.0, 3600.0)
"""Seconds of a block: the longest of which there are enough is taken."""
RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Site:
    """A site's nodes, and their speed as against the others'."""

    nodes: int
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class HomeJob:
    """A job as it would be at home, and how it was in the grid; in seconds."""

    job: EndedJob
    lasts: float
    """At home, from its placement to its end."""
    response: float | None
    """In the grid; None of one that is there to take up nodes only: nobody waited for what comes of it."""


Alone = Callable[[ClusterName, Site, Sequence[HomeJob]], Mapping[JobId, float]]
"""When each job would have ended had its site been alone, in seconds since the epoch; those that never would are not
in it."""


class WhyLeftOut(StrEnum):
    """Why a job is in no mean."""

    NO_HOME = "without a home site"
    GONE = "of a home site that is not in the grid any more"
    TOO_WIDE = "too wide for their home site"
    NEVER_RAN = "never ran"
    CANCELLED = "cancelled"
    EARLIER = "submitted before"
    NOT_OVER = "not over yet"
    NEVER_ALONE = "would not have ended alone"


class Verdict(StrEnum):
    """Whether a site, or every site, is better off, as far as that can be told."""

    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class SiteShare:
    """A site's own users' jobs; times are means in seconds from submission to end, None where there are none.

    ``gain`` is what the grid saves of them, with the bounds between which it lies in 95 of 100 cases.
    """

    site: ClusterName
    nodes: int
    speed: float
    jobs: int
    """That count: they ran to an end of their own, and could have at home."""
    elsewhere: int
    """Of these, those that ran at least in part on other sites."""
    too_wide: int
    """Beside these: jobs that nobody but the grid could run."""
    grid: float | None
    alone: float | None
    gain: float | None
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Jobs that are in no mean, for one reason; the first of them are named."""

    why: WhyLeftOut
    count: int
    jobs: Sequence[JobId]


@dataclass(frozen=True, slots=True)
class SharingReport:
    """Of jobs that were submitted from ``start`` to ``end``, in seconds since the epoch."""

    start: float
    end: float
    every_site: Verdict
    """``better`` where no site is worse off and one is better; ``unclear`` where that cannot be told of all."""
    sites: Sequence[SiteShare]
    left_out: Sequence[LeftOut]


@dataclass(slots=True)
class _Sorted:
    """Jobs by their home sites, and those that are in no mean by their reasons."""

    at_home: dict[ClusterName, list[HomeJob]] = field(default_factory=lambda: defaultdict(list))
    too_wide: dict[ClusterName, int] = field(default_factory=lambda: defaultdict(int))
    left_out: dict[WhyLeftOut, list[JobId]] = field(default_factory=lambda: defaultdict(list))


def compare(
    jobs: Iterable[EndedJob],
    sites: Mapping[ClusterName, Site],
    start: float,
    end: float,
    alone: Alone,
    under_way: Sequence[JobId] = (),
) -> SharingReport:
    """The same for the same jobs, in whatever order and wherever it is worked out.

    Jobs that were submitted before ``start`` are in no mean, and take up nodes; later than ``end`` there are none.
    """
    found = _Sorted()
    found.left_out[WhyLeftOut.NOT_OVER] += sorted(under_way)
    for job in sorted(jobs, key=lambda job: (job.submitted_at, job.id)):
        if job.submitted_at < end:
            _sort(found, job, sites, start)
    shares = [_share(name, site, found, alone) for name, site in sorted(sites.items())]
    left_out = [LeftOut(why, len(of), of[:MAX_NAMED]) for why in WhyLeftOut if (of := found.left_out.get(why))]
    return SharingReport(start, end, _of_all([share for share in shares if share.jobs]), shares, left_out)


def _sort(found: _Sorted, job: EndedJob, sites: Mapping[ClusterName, Site], start: float) -> None:
    site = sites.get(job.home_site)
    is_counted = job.submitted_at >= start and job.state is not JobState.CANCELLED
    why = None if is_counted else WhyLeftOut.EARLIER if job.submitted_at < start else WhyLeftOut.CANCELLED
    if not job.home_site:
        why = WhyLeftOut.NO_HOME
    elif site is None:
        why = WhyLeftOut.GONE
    elif job.started_at is None or job.nodes < 1:
        why = why or WhyLeftOut.NEVER_RAN
    elif job.nodes > site.nodes:
        why = WhyLeftOut.TOO_WIDE
        found.too_wide[job.home_site] += is_counted
    else:
        response = max(0.0, job.ended_at - job.submitted_at) if is_counted else None
        found.at_home[job.home_site].append(HomeJob(job, lasts_at_home(job, sites), response))
    if why is not None:
        found.left_out[why].append(job.id)


def lasts_at_home(job: EndedJob, sites: Mapping[ClusterName, Site]) -> float:
    """Seconds from its placement to its end: it starts up as it did, and runs at the speed of its home.

    Its slowest cluster was what it ran at; those of which nothing is known any more were as fast as its home.
    """
    started = job.ended_at if job.started_at is None else job.started_at
    home = sites[job.home_site].speed
    speed = min((sites[name].speed for name in job.clusters if name in sites), default=home)
    start_up = max(0.0, started - (started if job.placed_at is None else job.placed_at))
    return start_up + max(0.0, job.ended_at - started) * speed / home


def _share(name: ClusterName, site: Site, found: _Sorted, alone: Alone) -> SiteShare:
    jobs = found.at_home[name]
    ended = alone(name, site, jobs) if any(each.response is not None for each in jobs) else {}
    found.left_out[WhyLeftOut.NEVER_ALONE] += [
        each.job.id for each in jobs if each.response is not None and each.job.id not in ended
    ]
    pairs = [
        (each, each.response, max(0.0, ended[each.job.id] - each.job.submitted_at))
        for each in jobs
        if each.response is not None and each.job.id in ended
    ]
    if not pairs:
        unknown = (None, None, None, None, None, Verdict.UNCLEAR)
        return SiteShare(name, site.nodes, site.speed, 0, 0, found.too_wide[name], *unknown)
    gains = [(each.job.submitted_at, by_itself - shared) for each, shared, by_itself in pairs]
    grid, by_itself = fmean(shared for _, shared, _ in pairs), fmean(by_itself for _, _, by_itself in pairs)
    low, high = mean_bounds(gains, name) or (None, None)
    return SiteShare(
        site=name,
        nodes=site.nodes,
        speed=site.speed,
        jobs=len(pairs),
        elsewhere=sum(set(each.job.clusters) != {name} for each, _, _ in pairs),
        too_wide=found.too_wide[name],
        grid=grid,
        alone=by_itself,
        gain=by_itself - grid,
        low=low,
        high=high,
        verdict=_verdict(by_itself, low, high),
    )


def _verdict(alone: float, low: float | None, high: float | None) -> Verdict:
    if low is None or high is None:
        return Verdict.UNCLEAR
    slack = max(SLACK, SLACK_SHARE * alone)
    if -slack <= low and high <= slack:
        return Verdict.SAME
    return Verdict.BETTER if low > 0 else Verdict.WORSE if high < 0 else Verdict.UNCLEAR


def _of_all(shares: Sequence[SiteShare]) -> Verdict:
    """Of the sites that have jobs which count."""
    seen = {share.verdict for share in shares}
    if Verdict.WORSE in seen:
        return Verdict.WORSE
    if Verdict.UNCLEAR in seen or not seen:
        return Verdict.UNCLEAR
    return Verdict.BETTER if Verdict.BETTER in seen else Verdict.SAME


def mean_bounds(values: Sequence[tuple[float, float]], seed: str) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of (time, value) pairs by a block bootstrap; None for too few.

    Whole days are resampled, or hours where there are few days, since values of one day are not independent.
    """
    if len(values) < SMALLEST_SAMPLE:
        return None
    blocks = [(len(block), sum(block)) for block in _blocks(values)]
    draw = Random(seed)
    means = []
    for _ in range(RESAMPLES):
        drawn = draw.choices(blocks, k=len(blocks))
        means.append(sum(total for _, total in drawn) / sum(count for count, _ in drawn))
    means.sort()
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return means[tail], means[-1 - tail]


def _blocks(values: Sequence[tuple[float, float]]) -> list[list[float]]:
    for span in BLOCK_LENGTHS:
        blocks: dict[int, list[float]] = defaultdict(list)
        for at, value in values:
            blocks[int(at // span)].append(value)
        if len(blocks) >= MIN_BLOCKS:
            return list(blocks.values())
    in_order = [value for _, value in sorted(values)]
    size = -(-len(in_order) // MAX_BLOCKS)
    return [in_order[start : start + size] for start in range(0, len(in_order), size)]


@dataclass(frozen=True)
class SharingQuestion:
    """Whether sites are better off, by these jobs; from when to when in seconds since the epoch."""

    jobs: Sequence[EndedJob]
    sites: Mapping[ClusterName, Site]
    rules: Rules
    start: float
    end: float
    under_way: Sequence[JobId] = ()
    """Jobs with a home that were submitted in that time, and are not over."""


def answer(question: SharingQuestion, *pieces: Sequence[EndedJob]) -> SharingReport:
    """Of the question's jobs and those of the pieces.

    It takes a tenth of a millisecond for each job and more: nothing for a loop that others wait for.
    """

    def alone(name: ClusterName, site: Site, jobs: Sequence[HomeJob]) -> Mapping[JobId, float]:
        return ends_alone(name, site, jobs, question.rules)

    of = question
    return compare(chain(of.jobs, *pieces), of.sites, of.start, of.end, alone, of.under_way)


def ends_alone(name: ClusterName, site: Site, jobs: Sequence[HomeJob], rules: Rules) -> dict[JobId, float]:
    """When each of these jobs, in the order of their submissions, ends on that site; ``lasts`` is by its speed."""
    if not jobs:
        return {}
    begin = jobs[0].job.submitted_at
    specs: dict[JobSpec, JobSpec] = {}
    planned, whose = [], {}
    for each in jobs:
        spec = _spec(each)
        one = PlannedJob(each.job.submitted_at - begin, specs.setdefault(spec, spec), each.lasts)
        planned.append(one)
        whose[id(one)] = each.job.id
    outcome = Simulation(SimulatedGrid({name: SimulatedCluster(site.nodes)}), rules).run(planned)
    over = (job for job in outcome.jobs if job.state is JobState.SUCCEEDED)
    return {whose[id(job.planned)]: begin + job.ended for job in over}


def _spec(each: HomeJob) -> JobSpec:
    """All its nodes in one component, whatever it asked the grid for; it ends by itself, not by its walltime."""
    job = each.job
    walltime = None if job.walltime is None else max(job.walltime, each.lasts + 1.0)
    return JobSpec(
        NonFixedRequest((ComponentRequest(job.nodes),)),
        ("program",),
        policy="worst-fit",
        priority=Priority(job.priority),
        launcher=Launcher.PROCESSES,
        walltime=walltime,
    )
