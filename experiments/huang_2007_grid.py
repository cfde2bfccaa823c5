"""Simulate the grid of Huang, Shih and Chung (2007), its users, and how its sites share their nodes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from experiments.run_times import by_speed, multi_site, multiply_models
from experiments.traces import Traces
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest
from koalapy.model.users import SharingMode
from koalapy.scheduler.rules import ReclaimedPosition, Rules
from koalapy.simulation.jobs import Outcome, PlannedJob, mean_of_jobs
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid
from koalapy.workload.swf import TraceJob

TRACE = "SDSC-SP2-1998-huang56490"
SITES = (1, 2, 3, 4, 5)
"""Sites by number; the users of a site are those of the trace's queue of the same number."""
PROCESSORS = (8, 128, 128, 128, 50)
TABLE_3_LOAD = (5, 4, 5, 4, 1)
COMPLETED = 1
ENTIRE = "entire grid"
UNLIMITED = 1_000_000
SELDOM = 1e8
"""Scan interval in seconds, too long to occur: every event that may start a job triggers a scan at once."""


def jobs_of(traces: Traces) -> list[TraceJob]:
    """Return the completed jobs in the order of submission."""
    return [job for job in traces.read(TRACE).jobs if job.status == COMPLETED]


@dataclass(frozen=True)
class Setting:
    """The properties of the five sites and how they share their nodes.

    ``load`` holds a factor on the run times of each site's own jobs. ``p`` is the relative increase of the run time of
    a job on several sites; None forbids such jobs.
    """

    speed: Sequence[float]
    load: Sequence[float] = (1, 1, 1, 1, 1)
    policy: str = "fastest-one"
    sharing: SharingMode = "ordinary"
    threshold: float = 0.0
    reclaimed: ReclaimedPosition = "place"
    p: float | None = None

    def simulate_jobs(self, jobs: Iterable[TraceJob]) -> Outcome:
        """Simulate jobs, narrowest first, without backfilling, reservations or preemption (section 3 of the paper)."""
        grid = SimulatedGrid(
            {
                site_name(site): SimulatedCluster(nodes, float(speed))
                for site, nodes, speed in zip(SITES, PROCESSORS, self.speed, strict=True)
            }
        )
        rules = Rules(
            queue="fcfs",
            queue_order="narrowest-first",
            sharing=self.sharing,
            speed_threshold=self.threshold,
            reclaimed_position=self.reclaimed,
            preemption_order="jst",
            plan_after=None,
            keeps_for_restart=False,
            max_restarts=None,
            placement_queue_limit=UNLIMITED,
            scan_interval=SELDOM,
        )
        model = multiply_models(by_speed(grid.speeds), multi_site(self.p or 0.0))
        return Simulation(grid, rules, run_time=model).run(self._plan_jobs(jobs))

    def _plan_jobs(self, jobs: Iterable[TraceJob]) -> Iterator[PlannedJob]:
        specs: dict[tuple[int, int], JobSpec] = {}
        for job in jobs:
            kind = job.queue, job.processors
            if kind not in specs:
                specs[kind] = self._build_spec(*kind)
            yield PlannedJob(job.submitted, specs[kind], job.ran * self.load[job.queue - 1])

    def _build_spec(self, site: int, processors: int) -> JobSpec:
        one_site = NonFixedRequest((ComponentRequest(processors),))
        request = one_site if self.p is None else FlexibleRequest(processors)
        home = site_name(site)
        return JobSpec(request, ("job",), policy=self.policy, home_site=home, launcher=Launcher.PROCESSES)


def site_name(site: int) -> str:
    return f"site {site}"


def mean_responses(outcome: Outcome) -> dict[str, float]:
    """Return the mean response times of all jobs and of each site's own jobs; all jobs must have ended."""
    assert not outcome.not_run, f"{len(outcome.not_run)} jobs were not run: {outcome.not_run[0].reason}"
    means = {ENTIRE: mean_of_jobs([job.response for job in outcome.jobs])}
    for site in map(site_name, SITES):
        responses = [job.response for job in outcome.jobs if job.planned.spec.home_site == site]
        if responses:
            means[site] = mean_of_jobs(responses)
    return means
