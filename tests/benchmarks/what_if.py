"""``koala what-if`` where very many jobs wait: as the daemon has it worked out, over all processors."""

from random import Random
from time import monotonic

from koalapy.model.job import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest
from koalapy.policies.registry import builtin_policies
from koalapy.record.beginning import People
from koalapy.scheduler.rules import Rules
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.moment import Moment, moment_of
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.twin import HORIZON, Change, Question, answer_what_if

GRID = SimulatedGrid({f"c{number}": SimulatedCluster(nodes) for number, nodes in enumerate((85, 41, 46, 32))})
DAY = 86_400.0


def crowd(jobs: int) -> Moment:
    """A full grid as large as DAS-3, and so many jobs of forty applications that have just come: some of them fit into
    several clusters only."""
    draws, planned = Random(5), []
    for number in range(jobs):
        size = draws.choice([1, 1, 2, 4, 8, 16, 32])
        whole = size < 4 or draws.random() < 0.6
        request = NonFixedRequest((ComponentRequest(size),)) if whole else FlexibleRequest(size)
        spec = JobSpec(request, ("program", f"{number % 40}"), walltime=draws.choice([600.0, 1800.0, 3600.0]))
        planned.append(PlannedJob(number * 0.01, spec, draws.expovariate(1 / 300)))
    now = jobs * 0.01 + 1
    simulation = Simulation(GRID, Rules(placement_queue_limit=jobs + 1), until=now)
    simulation.run(planned)
    return moment_of(simulation.scheduler.queries, People(), now)


def what_if_s(jobs: int) -> dict[str, float]:
    """Seconds on the clock for another policy, by how far it looks ahead; as many as were left to simulate beside."""
    moment = crowd(jobs)
    found = {}
    for name, horizon in (("24 hours", DAY), ("to the end", HORIZON)):
        began = monotonic()
        told = answer_what_if(Question(moment, Change(policy="cluster-minimization"), builtin_policies, horizon))
        found[name] = monotonic() - began
        started = told.as_it_is.started
        assert started is not None
        print(f"  {name}: {found[name]:.1f} s, {started.middle:.0f} of {len(moment.jobs)} jobs start", flush=True)
    return found
