"""Comparison of the response times of each site's users in the grid and with only their home site.

The single-site case is simulated: the same jobs arrive at the same times with the same sizes. Their run times are the
actual ones, scaled by the speed of the clusters where they ran and of the home site.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from random import Random
from statistics import fmean

from koalapy.model.history import EndedJob
from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.request import ClusterName, ComponentRequest, NonFixedRequest
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid

MAX_NAMED = 100
"""Maximum number of jobs that are listed for one reason."""
SLACK, SLACK_SHARE = 1.0, 0.01
"""Difference of two means that is insignificant: in seconds, and as a share of the single-site mean.

A job that is placed half a second later, by a delay within the daemon, is neither a gain nor a loss.
"""

SMALLEST_SAMPLE = 10
"""Minimum number of values for a confidence interval."""
MIN_BLOCKS, MAX_BLOCKS = 10, 500
BLOCK_LENGTHS = (86400.0, 3600.0)
"""Candidate block lengths in seconds; the longest with enough blocks is used."""
RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Site:
    """The nodes of a site and their speed relative to other sites."""

    nodes: int
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class HomeJob:
    """A job with its run time at its home site and its response time in the grid, in seconds."""

    job: EndedJob
    lasts: float
    """Seconds at home from placement to end."""
    response: float | None
    """Response time in the grid; None for a job that only occupies nodes and does not count."""


SingleSiteEnds = Callable[[ClusterName, Site, Sequence[HomeJob]], Mapping[JobId, float]]
"""Returns the end times that jobs would have if their site were alone, in seconds since the epoch.

Jobs that would never end are missing.
"""


class ExclusionReason(StrEnum):
    """Reasons why a job counts in no mean."""

    NO_HOME = "without a home site"
    GONE = "of a home site that is not in the grid any more"
    TOO_WIDE = "too wide for their home site"
    NEVER_RAN = "never ran"
    CANCELLED = "cancelled"
    EARLIER = "submitted before"
    NOT_OVER = "not over yet"
    NEVER_ALONE = "would not have ended alone"


class Verdict(StrEnum):
    """Whether a site, or every site, is better off, as far as the data show."""

    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class SiteShare:
    """Statistics of the jobs of a site's users. Times are mean seconds from submission to end; None without jobs.

    ``gain`` is the time that the grid saves; ``low`` and ``high`` are its 95 % confidence interval.
    """

    site: ClusterName
    nodes: int
    speed: float
    jobs: int
    """Jobs that count: they ran to their end and fit on the home site."""
    elsewhere: int
    """Those of the counted jobs that ran at least partly on other sites."""
    too_wide: int
    """Jobs, in addition to the counted ones, that were too wide for the home site."""
    grid: float | None
    alone: float | None
    gain: float | None
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Jobs that count in no mean for one reason; the first of them are listed."""

    reason: ExclusionReason
    count: int
    jobs: Sequence[JobId]


@dataclass(frozen=True, slots=True)
class SharingReport:
    """A comparison of jobs submitted from ``start`` to ``end``, in seconds since the epoch."""

    start: float
    end: float
    every_site: Verdict
    """``better`` if no site is worse off and at least one is better; ``unclear`` if this is unknown for a site."""
    sites: Sequence[SiteShare]
    exclusions: Sequence[Exclusion]


@dataclass(slots=True)
class _JobGroups:
    """Jobs by home site, and jobs that count in no mean by reason."""

    at_home: dict[ClusterName, list[HomeJob]] = field(default_factory=lambda: defaultdict(list))
    too_wide: dict[ClusterName, int] = field(default_factory=lambda: defaultdict(int))
    exclusions: dict[ExclusionReason, list[JobId]] = field(default_factory=lambda: defaultdict(list))


def compare_sharing(
    jobs: Iterable[EndedJob],
    sites: Mapping[ClusterName, Site],
    start: float,
    end: float,
    alone: SingleSiteEnds,
    under_way: Sequence[JobId] = (),
) -> SharingReport:
    """Compare the response times of jobs in the grid with those they would have on only their home sites.

    ``alone`` simulates one such site. The result depends neither on the order of ``jobs`` nor on the process. Jobs
    submitted before ``start`` count in no mean, but occupy nodes. Jobs submitted from ``end`` on are ignored.
    """
    groups = _JobGroups()
    groups.exclusions[ExclusionReason.NOT_OVER] += sorted(under_way)
    for job in sorted(jobs, key=lambda job: (job.submitted_at, job.id)):
        if job.submitted_at < end:
            _sort_job(groups, job, sites, start)
    shares = [_site_share(name, site, groups, alone) for name, site in sorted(sites.items())]
    exclusions = [
        Exclusion(reason, len(excluded), excluded[:MAX_NAMED])
        for reason in ExclusionReason
        if (excluded := groups.exclusions.get(reason))
    ]
    return SharingReport(start, end, _judge_all_sites([share for share in shares if share.jobs]), shares, exclusions)


def _sort_job(groups: _JobGroups, job: EndedJob, sites: Mapping[ClusterName, Site], start: float) -> None:
    """Sort a job into those of its home site, or into those that count in no mean.

    A job that was cancelled, or submitted before ``start``, may be in both. It then occupies nodes but does not count.
    """
    site = sites.get(job.home_site)
    is_counted = job.submitted_at >= start and job.state is not JobState.CANCELLED
    reason = None if is_counted else ExclusionReason.EARLIER if job.submitted_at < start else ExclusionReason.CANCELLED
    if not job.home_site:
        reason = ExclusionReason.NO_HOME
    elif site is None:
        reason = ExclusionReason.GONE
    elif job.started_at is None or job.nodes < 1:
        reason = reason or ExclusionReason.NEVER_RAN
    elif job.nodes > site.nodes:
        reason = ExclusionReason.TOO_WIDE
        groups.too_wide[job.home_site] += is_counted
    else:
        response = max(0.0, job.ended_at - job.submitted_at) if is_counted else None
        groups.at_home[job.home_site].append(HomeJob(job, lasts_at_home(job, sites), response))
    if reason is not None:
        groups.exclusions[reason].append(job.id)


def lasts_at_home(job: EndedJob, sites: Mapping[ClusterName, Site]) -> float:
    """Return the seconds from placement to end at the home site.

    They are the actual start-up time, and the run time scaled to the home site's speed. The actual speed is that of the
    slowest cluster used. A cluster that is not in ``sites`` is assumed to be as fast as the home site.
    """
    started = job.ended_at if job.started_at is None else job.started_at
    home = sites[job.home_site].speed
    speed = min((sites[name].speed for name in job.clusters if name in sites), default=home)
    start_up = max(0.0, started - (started if job.placed_at is None else job.placed_at))
    return start_up + max(0.0, job.ended_at - started) * speed / home


def _site_share(name: ClusterName, site: Site, groups: _JobGroups, alone: SingleSiteEnds) -> SiteShare:
    """Compare the response times of a site's jobs in the grid with those on only the site's nodes.

    ``alone``: simulates the site without the grid. The statistics are None if no job counts.
    """
    jobs = groups.at_home[name]
    ended = alone(name, site, jobs) if any(entry.response is not None for entry in jobs) else {}
    groups.exclusions[ExclusionReason.NEVER_ALONE] += [
        entry.job.id for entry in jobs if entry.response is not None and entry.job.id not in ended
    ]
    pairs = [
        (entry, entry.response, max(0.0, ended[entry.job.id] - entry.job.submitted_at))
        for entry in jobs
        if entry.response is not None and entry.job.id in ended
    ]
    if not pairs:
        unknown = (None, None, None, None, None, Verdict.UNCLEAR)
        return SiteShare(name, site.nodes, site.speed, 0, 0, groups.too_wide[name], *unknown)
    gains = [(entry.job.submitted_at, by_itself - shared) for entry, shared, by_itself in pairs]
    grid, by_itself = fmean(shared for _, shared, _ in pairs), fmean(by_itself for _, _, by_itself in pairs)
    low, high = mean_bounds(gains, name) or (None, None)
    return SiteShare(
        site=name,
        nodes=site.nodes,
        speed=site.speed,
        jobs=len(pairs),
        elsewhere=sum(set(entry.job.clusters) != {name} for entry, _, _ in pairs),
        too_wide=groups.too_wide[name],
        grid=grid,
        alone=by_itself,
        gain=by_itself - grid,
        low=low,
        high=high,
        verdict=_judge_gain(by_itself, low, high),
    )


def _judge_gain(alone: float, low: float | None, high: float | None) -> Verdict:
    """Return whether a site is better off in the grid, from the 95 % interval of the seconds gained.

    ``alone``: the mean response time without the grid, in seconds. Small differences relative to it count as none.
    ``low`` and ``high`` are None if the jobs are too few for an interval.
    """
    if low is None or high is None:
        return Verdict.UNCLEAR
    slack = max(SLACK, SLACK_SHARE * alone)
    if -slack <= low and high <= slack:
        return Verdict.SAME
    return Verdict.BETTER if low > 0 else Verdict.WORSE if high < 0 else Verdict.UNCLEAR


def _judge_all_sites(shares: Sequence[SiteShare]) -> Verdict:
    """Return the verdict for all sites that have counted jobs."""
    verdicts = {share.verdict for share in shares}
    if Verdict.WORSE in verdicts:
        return Verdict.WORSE
    if Verdict.UNCLEAR in verdicts or not verdicts:
        return Verdict.UNCLEAR
    return Verdict.BETTER if Verdict.BETTER in verdicts else Verdict.SAME


def mean_bounds(values: Sequence[tuple[float, float]], seed: str) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of (time, value) pairs by a block bootstrap; None for too few values.

    Days are resampled, or hours if there are few days, since values of one day are not independent.
    """
    if len(values) < SMALLEST_SAMPLE:
        return None
    blocks = [(len(block), sum(block)) for block in _group_into_blocks(values)]
    draw = Random(seed)
    means = []
    for _ in range(RESAMPLES):
        drawn = draw.choices(blocks, k=len(blocks))
        means.append(sum(total for _, total in drawn) / sum(count for count, _ in drawn))
    means.sort()
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return means[tail], means[-1 - tail]


def _group_into_blocks(values: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Group the values of (time, value) pairs by day, or by hour if there are few days.

    If the hours are too few as well, return blocks of equal size in the order of time.
    """
    for span in BLOCK_LENGTHS:
        blocks: dict[int, list[float]] = defaultdict(list)
        for time, value in values:
            blocks[int(time // span)].append(value)
        if len(blocks) >= MIN_BLOCKS:
            return list(blocks.values())
    in_order = [value for _, value in sorted(values)]
    size = -(-len(in_order) // MAX_BLOCKS)
    return [in_order[start : start + size] for start in range(0, len(in_order), size)]


@dataclass(frozen=True)
class SharingQuestion:
    """Jobs and sites to compare, from ``start`` to ``end`` in seconds since the epoch."""

    jobs: Sequence[EndedJob]
    sites: Mapping[ClusterName, Site]
    rules: Rules
    start: float
    end: float
    under_way: Sequence[JobId] = ()
    """Unfinished jobs with a home site that were submitted in this period."""


def answer_sharing(question: SharingQuestion, *pieces: Sequence[EndedJob]) -> SharingReport:
    """Return the comparison for the jobs of the question and of the pieces.

    This takes at least 0.1 ms per job, so it must not run in an event loop.
    """

    def alone(name: ClusterName, site: Site, jobs: Sequence[HomeJob]) -> Mapping[JobId, float]:
        return simulate_single_site(name, site, jobs, question.rules)

    of = question
    return compare_sharing(chain(of.jobs, *pieces), of.sites, of.start, of.end, alone, of.under_way)


def simulate_single_site(name: ClusterName, site: Site, jobs: Sequence[HomeJob], rules: Rules) -> dict[JobId, float]:
    """Return the end time of each job if all of them could use only their home site.

    The jobs are in the order of their submission. ``HomeJob.lasts`` must already include the speed of the site.
    Times are in seconds since 1970 (UTC); jobs that do not succeed are missing.
    """
    if not jobs:
        return {}
    begin = jobs[0].job.submitted_at
    specs: dict[JobSpec, JobSpec] = {}
    planned, job_ids = [], {}
    for entry in jobs:
        spec = _single_site_spec(entry)
        plan = PlannedJob(entry.job.submitted_at - begin, specs.setdefault(spec, spec), entry.lasts)
        planned.append(plan)
        job_ids[id(plan)] = entry.job.id
    outcome = Simulation(SimulatedGrid({name: SimulatedCluster(site.nodes)}), rules).run(planned)
    finished = (job for job in outcome.jobs if job.state is JobState.SUCCEEDED)
    return {job_ids[id(job.planned)]: begin + job.ended for job in finished}


def _single_site_spec(entry: HomeJob) -> JobSpec:
    """Return a specification with all nodes in one component and a walltime that does not end the job."""
    job = entry.job
    walltime = None if job.walltime is None else max(job.walltime, entry.lasts + 1.0)
    return JobSpec(
        NonFixedRequest((ComponentRequest(job.nodes),)),
        ("program",),
        policy="worst-fit",
        priority=Priority(job.priority),
        launcher=Launcher.PROCESSES,
        walltime=walltime,
    )
