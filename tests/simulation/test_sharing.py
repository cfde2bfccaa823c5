"""Whether a site is better off in the grid: what is compared, with what, and how sure that is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.history import DAY, EndedJob
from koalapy.model.job import JobId, JobSpec, JobState, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.model.sharing import SharingMode
from koalapy.scheduler.rules import Rules
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.outcome import JobOutcome
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

START = 20_000 * DAY
SITES = {"north": Site(8), "south": Site(4, 2.0)}


def ended(
    ident: int, at: float, waits: float = 0.0, lasts: float = 100.0, home: str = "north", **changes: Any
) -> EndedJob:
    """One that was submitted so many seconds after the beginning, on two nodes of its home."""
    placed = START + at + waits
    job = EndedJob(
        id=ident,
        submitted_at=START + at,
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


def report(jobs: Sequence[EndedJob], sites: Mapping[str, Site] | None = None, **rules: Any) -> SharingReport:
    question = SharingQuestion(jobs, SITES if sites is None else sites, Rules(**rules), START, START + DAY)
    return answer_sharing(question)


def counts(found: SharingReport) -> dict[ExclusionReason, tuple[int, Sequence[JobId]]]:
    return {each.reason: (each.count, each.jobs) for each in found.exclusions}


# Which jobs count


def test_of_nothing_nothing_can_be_told() -> None:
    found = report([])
    assert (found.every_site, found.exclusions) == (Verdict.UNCLEAR, [])
    assert [(site.site, site.jobs, site.grid, site.alone, site.verdict) for site in found.sites] == [
        ("north", 0, None, None, Verdict.UNCLEAR),
        ("south", 0, None, None, Verdict.UNCLEAR),
    ]
    assert report([], {}).every_site is Verdict.UNCLEAR


def test_of_one_job_its_times_are_told_and_no_bounds() -> None:
    (north, _) = report([ended(1, 5.0, waits=30.0)]).sites
    assert (north.jobs, north.grid, north.alone, north.gain) == (1, 130.0, 100.0, -30.0)
    assert (north.low, north.high, north.verdict) == (None, None, Verdict.UNCLEAR)


def test_jobs_that_do_not_count_are_named_with_the_reason() -> None:
    jobs = [
        ended(1, 0.0, home=""),
        ended(2, 0.0, home="closed"),
        ended(3, 0.0, nodes=9, clusters=("north", "south")),
        ended(4, 0.0, started_at=None, placed_at=None, state=JobState.FAILED, nodes=0, clusters=()),
        ended(5, 0.0, state=JobState.CANCELLED),
        ended(6, -50.0),
        ended(7, DAY, home="north"),
        ended(8, 10.0, started_at=None, placed_at=None, state=JobState.CANCELLED, nodes=0, clusters=()),
    ]
    question = SharingQuestion(jobs, SITES, Rules(), START, START + DAY, [12, 11])
    found = answer_sharing(question)
    assert counts(found) == {
        ExclusionReason.NO_HOME: (1, [1]),
        ExclusionReason.GONE: (1, [2]),
        ExclusionReason.TOO_WIDE: (1, [3]),
        ExclusionReason.NEVER_RAN: (1, [4]),
        ExclusionReason.CANCELLED: (2, [5, 8]),
        ExclusionReason.EARLIER: (1, [6]),
        ExclusionReason.NOT_OVER: (2, [11, 12]),
    }
    assert [(site.jobs, site.too_wide) for site in found.sites] == [(0, 1), (0, 0)]
    assert found.every_site is Verdict.UNCLEAR


def test_of_many_jobs_that_do_not_count_the_first_are_named() -> None:
    ((count, named),) = counts(report([ended(ident, ident, home="") for ident in range(1, 300)])).values()
    assert (count, list(named)) == (299, list(range(1, 101)))


def test_jobs_of_before_and_cancelled_ones_take_up_nodes_all_the_same() -> None:
    for first in (ended(1, -50.0, nodes=8), ended(1, 0.0, lasts=50.0, nodes=8, state=JobState.CANCELLED)):
        (north, _) = report([first, ended(2, 10.0, nodes=1)]).sites
        assert (north.jobs, north.alone) == (1, 140.0)


@given(st.data())
def test_every_job_counts_or_is_left_out_for_one_reason(data: st.DataObject) -> None:
    some = st.builds(
        ended,
        ident=st.integers(1, 10**6),
        at=st.floats(-100.0, 2 * DAY),
        waits=st.sampled_from([0.0, 7.5, 1000.0]),
        lasts=st.sampled_from([0.0, 1.0, 5000.0]),
        home=st.sampled_from(["", "north", "south", "gone"]),
        nodes=st.integers(0, 12),
        state=st.sampled_from([JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED]),
        clusters=st.sampled_from([(), ("north",), ("north", "south"), ("gone",)]),
        walltime=st.sampled_from([None, 0.5, 100.0]),
        priority=st.sampled_from(list(Priority)),
    )
    jobs = data.draw(st.lists(some, max_size=12, unique_by=lambda job: job.id))
    found = report(jobs)
    meant = [job for job in jobs if job.submitted_at < START + DAY]
    assert sum(site.jobs for site in found.sites) + sum(each.count for each in found.exclusions) == len(meant)
    exclusions = [job for each in found.exclusions for job in each.jobs]
    assert len(exclusions) == len(set(exclusions))
    assert ExclusionReason.NEVER_ALONE not in counts(found)
    assert report(data.draw(st.permutations(jobs))) == found


# How long they take alone


def test_alone_they_wait_for_each_other_and_not_for_those_of_others() -> None:
    crowd = [ended(ident, 0.0, nodes=8) for ident in range(1, 4)]
    south = [ended(9, 0.0, home="south", nodes=4, lasts=50.0)]
    found = report([*crowd, *south])
    assert [site.alone for site in found.sites] == [200.0, 50.0]
    assert [site.grid for site in found.sites] == [100.0, 50.0]


@pytest.mark.parametrize(
    ("home", "clusters", "lasts"),
    [
        ("north", ("north",), 110.0),
        ("north", ("south",), 210.0),
        ("south", ("north",), 60.0),
        # As slow as the slowest that it was on; nobody knows how fast one was that is gone.
        ("south", ("north", "south"), 60.0),
        ("south", ("gone",), 110.0),
        ("south", (), 110.0),
    ],
)
def test_a_job_runs_at_the_speed_of_its_home_and_starts_up_as_it_did(
    home: str, clusters: tuple[str, ...], lasts: float
) -> None:
    job = ended(1, 0.0, home=home, clusters=clusters)
    started = replace(job, started_at=job.submitted_at + 10.0, ended_at=job.submitted_at + 110.0)
    assert lasts_at_home(started, SITES) == lasts


def test_a_walltime_ends_nobody_who_is_slower_at_home() -> None:
    (north, _) = report([ended(1, 0.0, lasts=100.0, clusters=("south",), walltime=120.0)]).sites
    assert north.alone == 200.0


def test_alone_the_rules_of_the_daemon_hold() -> None:
    jobs = [ended(1, 0.0, nodes=6), ended(2, 1.0, nodes=8), ended(3, 2.0, nodes=2, lasts=500.0)]
    first_come, past_others = (report(jobs, queue=queue).sites[0].alone for queue in ("fcfs", "scan"))
    assert first_come == pytest.approx((100 + 199 + 698) / 3)
    assert past_others == pytest.approx((100 + 601 + 500) / 3)


def test_who_would_never_have_ended_alone_is_named() -> None:
    """As where the rules let nobody wait for so long."""
    jobs = [ended(1, 0.0, nodes=8, lasts=5000.0), ended(2, 1.0, nodes=8)]
    found = report(jobs, max_placement_tries=1)
    assert counts(found) == {ExclusionReason.NEVER_ALONE: (1, [2])}
    assert found.sites[0].jobs == 1


def test_times_that_stand_still_are_no_fault() -> None:
    jobs = [ended(ident, 0.0, lasts=0.0) for ident in range(1, 30)]
    (north, _) = report(jobs).sites
    assert (north.jobs, north.grid, north.alone, north.verdict) == (29, 0.0, 0.0, Verdict.SAME)


def test_a_clock_that_went_back_makes_no_negative_times() -> None:
    job = ended(1, 0.0)
    (north, _) = report([replace(job, started_at=job.submitted_at - 5.0, ended_at=job.submitted_at - 10.0)]).sites
    assert (north.grid, north.alone) == (0.0, 0.0)


@given(st.integers(0, 10**6))
def test_a_grid_in_which_all_ran_at_home_is_the_site_by_itself(seed: int) -> None:
    """What was simulated is told as if it had been recorded: then nobody gains or loses anything."""
    draw = Random(seed)
    at = 0.0
    jobs = []
    for ident in range(1, 40):
        at += draw.choice([0.0, 1.0, 60.0])
        jobs.append(ended(ident, at, lasts=draw.choice([1.0, 90.0, 300.0]), nodes=draw.randint(1, 8)))
    alone = simulate_single_site(
        "north", SITES["north"], [HomeJob(job, lasts_at_home(job, SITES), None) for job in jobs], Rules()
    )
    really = [
        replace(job, placed_at=end - (job.ended_at - job.started_at), started_at=end - (job.ended_at - job.started_at))
        for job in jobs
        if job.started_at is not None and (end := alone[job.id])
    ]
    really = [replace(job, ended_at=alone[job.id]) for job in really]
    (north, _) = report(really).sites
    assert north.gain == pytest.approx(0.0, abs=1e-3)
    assert north.verdict is Verdict.SAME


# How sure it is


def gains(found: float, count: int = 200, spread: float = 50.0) -> list[EndedJob]:
    """Of jobs that would take 100 s each alone, and as much less in the grid, or more."""
    draw = Random(7)
    return [
        ended(ident, ident * 400.0, lasts=100.0, ended_at=START + ident * 400.0 + 100.0 - found + draw.gauss(0, spread))
        for ident in range(count)
    ]


def verdict_on(found: float, spread: float) -> Verdict:
    def alone(name: str, site: Site, jobs: Sequence[HomeJob]) -> dict[JobId, float]:
        return {each.job.id: each.job.submitted_at + 100.0 for each in jobs}

    return compare_sharing(gains(found, spread=spread), {"north": Site(8)}, START, START + DAY, alone).every_site


@pytest.mark.parametrize(
    ("found", "spread", "verdict"),
    [
        (30.0, 50.0, Verdict.BETTER),
        (-30.0, 50.0, Verdict.WORSE),
        (1.0, 50.0, Verdict.UNCLEAR),
        # A second is nobody's gain or loss, however sure it is.
        (0.5, 0.0, Verdict.SAME),
        (-0.5, 0.0, Verdict.SAME),
    ],
)
def test_a_site_is_better_off_where_that_is_sure(found: float, spread: float, verdict: Verdict) -> None:
    assert verdict_on(found, spread) is verdict


def test_every_site_is_better_off_only_if_none_is_worse() -> None:
    """South lends its nodes to north, whose users crowd them."""
    north = [ended(n, n * 50.0, lasts=100.0, nodes=8, clusters=("south",)) for n in range(1, 60)]
    south = [ended(n, n * 50.0, waits=400.0, lasts=10.0, home="south") for n in range(1000, 1060)]
    found = report([*north, *south])
    assert [site.verdict for site in found.sites] == [Verdict.BETTER, Verdict.WORSE]
    assert found.every_site is Verdict.WORSE
    assert report(north).every_site is Verdict.BETTER
    few = [ended(n, n * 50.0, home="south") for n in range(3)]
    assert report([*north, *few]).every_site is Verdict.UNCLEAR


def test_bounds_are_of_days_where_there_are_enough() -> None:
    """Jobs of one day have one fate: a thousand of them are ten days, and no more."""
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
def test_bounds_lie_between_the_least_and_the_most(values: list[tuple[float, float]], seed: str) -> None:
    found = mean_bounds(values, seed)
    assert (found is None) == (len(values) < 10)
    if found is not None:
        least, most = min(value for _, value in values), max(value for _, value in values)
        slack = 1e-6 * max(1.0, abs(least), abs(most))
        assert least - slack <= found[0] <= found[1] <= most + slack
        assert mean_bounds(values, seed) == found


# Where it matters: a site with few users of its own, as huang-2007 has it


def shared(sharing: SharingMode) -> SharingReport:
    """North's users crowd; south has few of its own. What is simulated is told as if it had been recorded."""
    draw = Random(5)
    jobs = []
    for home, count, sizes in (("north", 150, (1, 2, 4)), ("south", 40, (4, 8))):
        spec = {
            size: JobSpec(FlexibleRequest(size, max_components=1), ("program",), "fastest-one", home_site=home)
            for size in sizes
        }
        ats = sorted(draw.uniform(0, 20_000) for _ in range(count))
        jobs += [PlannedJob(at, spec[draw.choice(sizes)], draw.choice([100.0, 900.0])) for at in ats]
    grid = SimulatedGrid({"north": SimulatedCluster(8), "south": SimulatedCluster(8)})
    rules = Rules(sharing=sharing, queue="head", queue_order="narrowest-first", low_patience=None, aging=False)
    outcome = Simulation(grid, rules).run(sorted(jobs, key=lambda job: job.arrives_at))
    assert len(outcome.succeeded_jobs()) == len(jobs)
    return compare_alone([_recorded(each) for each in outcome.jobs], rules)


def _recorded(each: JobOutcome) -> EndedJob:
    home, (where, size) = each.planned.spec.home_site, each.gang[0]
    job = ended(
        each.ident, each.planned.arrives_at, home=home, nodes=size, clusters=(where,), ended_at=START + each.ended
    )
    started = START + (each.started or 0.0)
    return replace(job, placed_at=started, started_at=started)


def compare_alone(jobs: Sequence[EndedJob], rules: Rules) -> SharingReport:
    sites = {"north": Site(8), "south": Site(8)}
    return answer_sharing(SharingQuestion(jobs, sites, replace(rules, sharing="ordinary"), START, START + DAY))


def test_who_lends_all_is_worse_off_and_is_told_so_and_who_may_take_it_back_is_not() -> None:
    ordinary, feasible, independent = shared("ordinary"), shared("feasible"), shared("independent")
    assert [site.verdict for site in ordinary.sites] == [Verdict.BETTER, Verdict.WORSE]
    assert ordinary.every_site is Verdict.WORSE
    assert feasible.sites[0].verdict is Verdict.BETTER
    assert feasible.sites[1].verdict in (Verdict.BETTER, Verdict.SAME)
    assert feasible.every_site is Verdict.BETTER
    assert [site.gain for site in independent.sites] == [pytest.approx(0.0, abs=1e-3)] * 2
    assert independent.every_site is Verdict.SAME
