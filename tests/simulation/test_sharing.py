"""Comparison of a site in the grid with the site alone, with confidence intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.history import DAY, EndedJob
from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.model.users import SharingMode
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import JobOutcome, PlannedJob
from koalapy.simulation.sharing import (
    ExclusionReason,
    HomeJob,
    SharingQuestion,
    SharingReport,
    Site,
    Verdict,
    answer_sharing,
    compare_sharing,
    lasts_at_home,
    mean_bounds,
    simulate_single_site,
)
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid

START = 20_000 * DAY
SITES = {"north": Site(8), "south": Site(4, 2.0)}


def make_job(
    ident: int, submitted_at: float, waits: float = 0.0, lasts: float = 100.0, home: str = "north", **changes: Any
) -> EndedJob:
    """Create a job on two nodes of its home site, submitted ``submitted_at`` seconds after the start."""
    placed = START + submitted_at + waits
    job = EndedJob(
        id=ident,
        submitted_at=START + submitted_at,
        started_at=placed,
        ended_at=placed + lasts,
        state=JobState.SUCCEEDED,
        owner="ada",
        application="wave",
        priority=Priority.LOW,
        walltime=None,
        nodes=2,
        clusters=(home or "north",),
        placed_at=placed,
        home_site=home,
    )
    return replace(job, **changes)


def create_report(jobs: Sequence[EndedJob], sites: Mapping[str, Site] | None = None, **rules: Any) -> SharingReport:
    question = SharingQuestion(jobs, SITES if sites is None else sites, Rules(**rules), START, START + DAY)
    return answer_sharing(question)


def exclusions_by_reason(report: SharingReport) -> dict[ExclusionReason, tuple[int, Sequence[JobId]]]:
    return {exclusion.reason: (exclusion.count, exclusion.jobs) for exclusion in report.exclusions}


# Which jobs count


def test_sharing_without_jobs_is_unclear() -> None:
    report = create_report([])
    assert (report.every_site, report.exclusions) == (Verdict.UNCLEAR, [])
    assert [(site.site, site.jobs, site.grid, site.alone, site.verdict) for site in report.sites] == [
        ("north", 0, None, None, Verdict.UNCLEAR),
        ("south", 0, None, None, Verdict.UNCLEAR),
    ]
    assert create_report([], {}).every_site is Verdict.UNCLEAR


def test_sharing_of_one_job_has_times_without_bounds() -> None:
    (north, _) = create_report([make_job(1, 5.0, waits=30.0)]).sites
    assert (north.jobs, north.grid, north.alone, north.gain) == (1, 130.0, 100.0, -30.0)
    assert (north.low, north.high, north.verdict) == (None, None, Verdict.UNCLEAR)


def test_sharing_lists_excluded_jobs_by_reason() -> None:
    jobs = [
        make_job(1, 0.0, home=""),
        make_job(2, 0.0, home="closed"),
        make_job(3, 0.0, nodes=9, clusters=("north", "south")),
        make_job(4, 0.0, started_at=None, placed_at=None, state=JobState.FAILED, nodes=0, clusters=()),
        make_job(5, 0.0, state=JobState.CANCELLED),
        make_job(6, -50.0),
        make_job(7, DAY, home="north"),
        make_job(8, 10.0, started_at=None, placed_at=None, state=JobState.CANCELLED, nodes=0, clusters=()),
    ]
    question = SharingQuestion(jobs, SITES, Rules(), START, START + DAY, [12, 11])
    report = answer_sharing(question)
    assert exclusions_by_reason(report) == {
        ExclusionReason.NO_HOME: (1, [1]),
        ExclusionReason.GONE: (1, [2]),
        ExclusionReason.TOO_WIDE: (1, [3]),
        ExclusionReason.NEVER_RAN: (1, [4]),
        ExclusionReason.CANCELLED: (2, [5, 8]),
        ExclusionReason.EARLIER: (1, [6]),
        ExclusionReason.NOT_OVER: (2, [11, 12]),
    }
    assert [(site.jobs, site.too_wide) for site in report.sites] == [(0, 1), (0, 0)]
    assert report.every_site is Verdict.UNCLEAR


def test_sharing_with_many_excluded_jobs_lists_the_first() -> None:
    ((count, listed),) = exclusions_by_reason(
        create_report([make_job(ident, ident, home="") for ident in range(1, 300)])
    ).values()
    assert (count, list(listed)) == (299, list(range(1, 101)))


def test_sharing_earlier_and_cancelled_jobs_occupy_nodes() -> None:
    for first in (make_job(1, -50.0, nodes=8), make_job(1, 0.0, lasts=50.0, nodes=8, state=JobState.CANCELLED)):
        (north, _) = create_report([first, make_job(2, 10.0, nodes=1)]).sites
        assert (north.jobs, north.alone) == (1, 140.0)


@given(st.data())
def test_sharing_counts_or_excludes_each_job_once(data: st.DataObject) -> None:
    ended_jobs = st.builds(
        make_job,
        ident=st.integers(1, 10**6),
        submitted_at=st.floats(-100.0, 2 * DAY),
        waits=st.sampled_from([0.0, 7.5, 1000.0]),
        lasts=st.sampled_from([0.0, 1.0, 5000.0]),
        home=st.sampled_from(["", "north", "south", "gone"]),
        nodes=st.integers(0, 12),
        state=st.sampled_from([JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED]),
        clusters=st.sampled_from([(), ("north",), ("north", "south"), ("gone",)]),
        walltime=st.sampled_from([None, 0.5, 100.0]),
        priority=st.sampled_from(list(Priority)),
    )
    jobs = data.draw(st.lists(ended_jobs, max_size=12, unique_by=lambda job: job.id))
    report = create_report(jobs)
    submitted = [job for job in jobs if job.submitted_at < START + DAY]
    assert sum(site.jobs for site in report.sites) + sum(exclusion.count for exclusion in report.exclusions) == len(
        submitted
    )
    exclusions = [job for exclusion in report.exclusions for job in exclusion.jobs]
    assert len(exclusions) == len(set(exclusions))
    assert ExclusionReason.NEVER_ALONE not in exclusions_by_reason(report)
    assert create_report(data.draw(st.permutations(jobs))) == report


# Run times on the site alone


def test_single_site_jobs_wait_only_for_each_other() -> None:
    crowd = [make_job(ident, 0.0, nodes=8) for ident in range(1, 4)]
    south = [make_job(9, 0.0, home="south", nodes=4, lasts=50.0)]
    report = create_report([*crowd, *south])
    assert [site.alone for site in report.sites] == [200.0, 50.0]
    assert [site.grid for site in report.sites] == [100.0, 50.0]


@pytest.mark.parametrize(
    ("home", "clusters", "lasts"),
    [
        ("north", ("north",), 110.0),
        ("north", ("south",), 210.0),
        ("south", ("north",), 60.0),
        # The slowest cluster counts; a removed cluster is assumed to be as fast as the home site.
        ("south", ("north", "south"), 60.0),
        ("south", ("gone",), 110.0),
        ("south", (), 110.0),
    ],
)
def test_lasts_at_home_scales_run_time_and_keeps_startup(home: str, clusters: tuple[str, ...], lasts: float) -> None:
    job = make_job(1, 0.0, home=home, clusters=clusters)
    started = replace(job, started_at=job.submitted_at + 10.0, ended_at=job.submitted_at + 110.0)
    assert lasts_at_home(started, SITES) == lasts


def test_single_site_slower_job_is_not_ended_by_walltime() -> None:
    (north, _) = create_report([make_job(1, 0.0, lasts=100.0, clusters=("south",), walltime=120.0)]).sites
    assert north.alone == 200.0


def test_single_site_follows_the_rules_of_the_daemon() -> None:
    jobs = [make_job(1, 0.0, nodes=6), make_job(2, 1.0, nodes=8), make_job(3, 2.0, nodes=2, lasts=500.0)]
    first_come, past_others = (create_report(jobs, queue=queue).sites[0].alone for queue in ("fcfs", "scan"))
    assert first_come == pytest.approx((100 + 199 + 698) / 3)
    assert past_others == pytest.approx((100 + 601 + 500) / 3)


def test_sharing_excludes_jobs_that_never_end_alone() -> None:
    """With ``max_placement_tries`` a waiting job gives up."""
    jobs = [make_job(1, 0.0, nodes=8, lasts=5000.0), make_job(2, 1.0, nodes=8)]
    report = create_report(jobs, max_placement_tries=1)
    assert exclusions_by_reason(report) == {ExclusionReason.NEVER_ALONE: (1, [2])}
    assert report.sites[0].jobs == 1


def test_sharing_of_jobs_without_duration_is_same() -> None:
    jobs = [make_job(ident, 0.0, lasts=0.0) for ident in range(1, 30)]
    (north, _) = create_report(jobs).sites
    assert (north.jobs, north.grid, north.alone, north.verdict) == (29, 0.0, 0.0, Verdict.SAME)


def test_sharing_with_clock_set_back_has_no_negative_times() -> None:
    job = make_job(1, 0.0)
    (north, _) = create_report(
        [replace(job, started_at=job.submitted_at - 5.0, ended_at=job.submitted_at - 10.0)]
    ).sites
    assert (north.grid, north.alone) == (0.0, 0.0)


@given(st.integers(0, 10**6))
def test_sharing_of_jobs_run_at_home_has_no_gain(seed: int) -> None:
    """Report a simulated single site as a recording: the gain is zero."""
    draw = Random(seed)
    submitted_at = 0.0
    jobs = []
    for ident in range(1, 40):
        submitted_at += draw.choice([0.0, 1.0, 60.0])
        jobs.append(make_job(ident, submitted_at, lasts=draw.choice([1.0, 90.0, 300.0]), nodes=draw.randint(1, 8)))
    alone = simulate_single_site(
        "north", SITES["north"], [HomeJob(job, lasts_at_home(job, SITES), None) for job in jobs], Rules()
    )
    recorded = [
        replace(job, placed_at=end - (job.ended_at - job.started_at), started_at=end - (job.ended_at - job.started_at))
        for job in jobs
        if job.started_at is not None and (end := alone[job.id])
    ]
    recorded = [replace(job, ended_at=alone[job.id]) for job in recorded]
    (north, _) = create_report(recorded).sites
    assert north.gain == pytest.approx(0.0, abs=1e-3)
    assert north.verdict is Verdict.SAME


# Confidence


def jobs_with_gain(gain: float, count: int = 200, spread: float = 50.0) -> list[EndedJob]:
    """Create jobs of 100 s each on the site alone, with that mean gain in the grid."""
    draw = Random(7)
    return [
        make_job(
            ident, ident * 400.0, lasts=100.0, ended_at=START + ident * 400.0 + 100.0 - gain + draw.gauss(0, spread)
        )
        for ident in range(count)
    ]


def verdict_for(gain: float, spread: float) -> Verdict:
    def alone(name: str, site: Site, jobs: Sequence[HomeJob]) -> dict[JobId, float]:
        return {entry.job.id: entry.job.submitted_at + 100.0 for entry in jobs}

    return compare_sharing(
        jobs_with_gain(gain, spread=spread), {"north": Site(8)}, START, START + DAY, alone
    ).every_site


@pytest.mark.parametrize(
    ("gain", "spread", "verdict"),
    [
        (30.0, 50.0, Verdict.BETTER),
        (-30.0, 50.0, Verdict.WORSE),
        (1.0, 50.0, Verdict.UNCLEAR),
        # A difference of a second is insignificant.
        (0.5, 0.0, Verdict.SAME),
        (-0.5, 0.0, Verdict.SAME),
    ],
)
def test_verdict_follows_significant_gain(gain: float, spread: float, verdict: Verdict) -> None:
    assert verdict_for(gain, spread) is verdict


def test_verdict_of_all_sites_is_the_worst() -> None:
    """South lends its nodes to many jobs of north."""
    north = [make_job(n, n * 50.0, lasts=100.0, nodes=8, clusters=("south",)) for n in range(1, 60)]
    south = [make_job(n, n * 50.0, waits=400.0, lasts=10.0, home="south") for n in range(1000, 1060)]
    report = create_report([*north, *south])
    assert [site.verdict for site in report.sites] == [Verdict.BETTER, Verdict.WORSE]
    assert report.every_site is Verdict.WORSE
    assert create_report(north).every_site is Verdict.BETTER
    few = [make_job(n, n * 50.0, home="south") for n in range(3)]
    assert create_report([*north, *few]).every_site is Verdict.UNCLEAR


def test_mean_bounds_resample_whole_days() -> None:
    """Jobs of one day are not independent: a thousand jobs of ten days count as ten days."""
    draw = Random(1)
    fates = [draw.gauss(0, 100.0) for _ in range(12)]
    values = [(day * DAY + second, fate) for day, fate in enumerate(fates) for second in range(100)]
    together = mean_bounds(values, "a")
    apart = mean_bounds([(second * DAY, fate) for second, (_, fate) in enumerate(values)], "a")
    assert together is not None
    assert apart is not None
    assert together[1] - together[0] > 5 * (apart[1] - apart[0])
    assert together[0] < sum(fates) / len(fates) < together[1]


@given(st.lists(st.tuples(st.floats(0, 40 * DAY), st.floats(-1e6, 1e6)), max_size=60), st.text(max_size=3))
def test_mean_bounds_lie_between_minimum_and_maximum(values: list[tuple[float, float]], seed: str) -> None:
    bounds = mean_bounds(values, seed)
    assert (bounds is None) == (len(values) < 10)
    if bounds is not None:
        minimum, maximum = min(value for _, value in values), max(value for _, value in values)
        slack = 1e-6 * max(1.0, abs(minimum), abs(maximum))
        assert minimum - slack <= bounds[0] <= bounds[1] <= maximum + slack
        assert mean_bounds(values, seed) == bounds


# A site with few users, as in huang-2007


def simulate_sharing(sharing: SharingMode) -> SharingReport:
    """Simulate many jobs of north and few of south, and report them as a recording."""
    draw = Random(5)
    jobs = []
    for home, count, sizes in (("north", 150, (1, 2, 4)), ("south", 40, (4, 8))):
        spec = {
            size: JobSpec(FlexibleRequest(size, max_components=1), ("program",), "fastest-one", home_site=home)
            for size in sizes
        }
        arrivals = sorted(draw.uniform(0, 20_000) for _ in range(count))
        jobs += [PlannedJob(arrival, spec[draw.choice(sizes)], draw.choice([100.0, 900.0])) for arrival in arrivals]
    grid = SimulatedGrid({"north": SimulatedCluster(8), "south": SimulatedCluster(8)})
    rules = Rules(sharing=sharing, queue="head", queue_order="narrowest-first", low_patience=None, aging=False)
    outcome = Simulation(grid, rules).run(sorted(jobs, key=lambda job: job.arrives_at))
    assert len(outcome.succeeded_jobs()) == len(jobs)
    return create_shared_report([record_outcome(outcome_job) for outcome_job in outcome.jobs], rules)


def record_outcome(outcome: JobOutcome) -> EndedJob:
    home, (cluster, size) = outcome.planned.spec.home_site, outcome.gang[0]
    job = make_job(
        outcome.ident,
        outcome.planned.arrives_at,
        home=home,
        nodes=size,
        clusters=(cluster,),
        ended_at=START + outcome.ended,
    )
    started = START + (outcome.started or 0.0)
    return replace(job, placed_at=started, started_at=started)


def create_shared_report(jobs: Sequence[EndedJob], rules: Rules) -> SharingReport:
    sites = {"north": Site(8), "south": Site(8)}
    return answer_sharing(SharingQuestion(jobs, sites, replace(rules, sharing="ordinary"), START, START + DAY))


def test_sharing_mode_decides_whether_a_lending_site_loses() -> None:
    ordinary, feasible, independent = (
        simulate_sharing("ordinary"),
        simulate_sharing("feasible"),
        simulate_sharing("independent"),
    )
    assert [site.verdict for site in ordinary.sites] == [Verdict.BETTER, Verdict.WORSE]
    assert ordinary.every_site is Verdict.WORSE
    assert feasible.sites[0].verdict is Verdict.BETTER
    assert feasible.sites[1].verdict in (Verdict.BETTER, Verdict.SAME)
    assert feasible.every_site is Verdict.BETTER
    assert [site.gain for site in independent.sites] == [pytest.approx(0.0, abs=1e-3)] * 2
    assert independent.every_site is Verdict.SAME
