"""A site by itself: the jobs of its own users on its own nodes, placed by the scheduler of production."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from koalapy.model.history import EndedJob
from koalapy.model.job import JobId, JobSpec, JobState, Launcher, Priority
from koalapy.model.request import ClusterName, ComponentRequest, NonFixedRequest
from koalapy.scheduler.rules import Rules
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.sharing import HomeJob, SharingReport, Site, compare
from koalapy.simulation.simulation import Simulation


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
