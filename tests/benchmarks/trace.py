"""The trace of huang-2007 through the simulation: its five sites, one queue for all of them, narrow jobs first.

A site's users are those of the trace's queue of that number, and each job runs on the fastest site that has room.
"""

import resource
import sys
from collections.abc import Sequence

from experiments.run_times import by_speed
from experiments.traces import Traces, default_folder
from koalapy.model.job import JobSpec
from koalapy.model.request import ComponentRequest, NonFixedRequest
from koalapy.scheduler.rules import Rules
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.outcome import Outcome
from koalapy.simulation.simulation import Simulation

TRACE = "SDSC-SP2-1998-huang56490"
TRACES = Traces(default_folder())
NODES = {"site-1": 8, "site-2": 128, "site-3": 128, "site-4": 128, "site-5": 50}
SPEEDS = {"site-1": 0.6, "site-2": 0.7, "site-3": 2.4, "site-4": 9.5, "site-5": 4.3}
LOADS = (5, 4, 5, 4, 1)
"""By which the run times of each site's users are multiplied, so that jobs wait."""
GRID = SimulatedGrid({name: SimulatedCluster(nodes, SPEEDS[name]) for name, nodes in NODES.items()})
RULES = Rules(queue="head", queue_order="narrowest-first")
MANY = 200_000
"""Jobs of which the memory is told."""


def jobs(number: int | None = None) -> list[PlannedJob]:
    """The first of them, or all; and when there are not as many, they come again and again."""
    specs: dict[int, JobSpec] = {}
    planned: list[PlannedJob] = []
    found, begins = TRACES.read(TRACE).jobs, 0.0
    while number is None or len(planned) < number:
        for each in found[: None if number is None else number - len(planned)]:
            request = NonFixedRequest((ComponentRequest(each.processors),))
            spec = specs.setdefault(each.processors, JobSpec(request, ("program",), policy="fastest-one"))
            planned.append(PlannedJob(begins + each.submitted, spec, each.ran * LOADS[each.queue - 1]))
        if number is None:
            break
        begins = planned[-1].arrives_at
    return planned


def simulate(planned: Sequence[PlannedJob]) -> Outcome:
    outcome = Simulation(GRID, RULES, run_time=by_speed(GRID.speeds)).run(planned)
    assert len(outcome.succeeded_jobs()) == len(planned)
    return outcome


def main() -> None:
    """The most memory that a process has which simulates so many jobs, in MB."""
    outcome = simulate(jobs(int(sys.argv[1])))
    assert outcome.jobs
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main()
