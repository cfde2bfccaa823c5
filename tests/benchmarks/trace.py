"""Simulate the trace of huang-2007: its five sites, and one queue for all with narrow jobs first.

The users of a site are those of the trace's queue with its number. Each job runs on the fastest site with capacity.
"""

import resource
import sys
from collections.abc import Sequence

from experiments.run_times import by_speed
from experiments.traces import Traces, default_folder
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, NonFixedRequest
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import Outcome, PlannedJob
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid

TRACE = "SDSC-SP2-1998-huang56490"
TRACES = Traces(default_folder())
NODES = {"site-1": 8, "site-2": 128, "site-3": 128, "site-4": 128, "site-5": 50}
SPEEDS = {"site-1": 0.6, "site-2": 0.7, "site-3": 2.4, "site-4": 9.5, "site-5": 4.3}
LOADS = (5, 4, 5, 4, 1)
"""Factors of the run times of each site's users, by which jobs have to wait."""
GRID = SimulatedGrid({name: SimulatedCluster(nodes, SPEEDS[name]) for name, nodes in NODES.items()})
RULES = Rules(queue="head", queue_order="narrowest-first")
MEMORY_JOB_COUNT = 200_000
"""Number of jobs for the measurement of memory."""


def load_jobs(number: int | None = None) -> list[PlannedJob]:
    """Return the first ``number`` jobs of the trace, repeated if there are fewer, or all jobs."""
    specs: dict[int, JobSpec] = {}
    planned: list[PlannedJob] = []
    records, offset = TRACES.read(TRACE).jobs, 0.0
    while number is None or len(planned) < number:
        for record in records[: None if number is None else number - len(planned)]:
            request = NonFixedRequest((ComponentRequest(record.processors),))
            spec = specs.setdefault(record.processors, JobSpec(request, ("program",), policy="fastest-one"))
            planned.append(PlannedJob(offset + record.submitted, spec, record.ran * LOADS[record.queue - 1]))
        if number is None:
            break
        offset = planned[-1].arrives_at
    return planned


def simulate(planned: Sequence[PlannedJob]) -> Outcome:
    outcome = Simulation(GRID, RULES, run_time=by_speed(GRID.speeds)).run(planned)
    assert len(outcome.succeeded_jobs()) == len(planned)
    return outcome


def main() -> None:
    """Simulate a number of jobs, and print the peak memory of this process in MB."""
    outcome = simulate(load_jobs(int(sys.argv[1])))
    assert outcome.jobs
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main()
