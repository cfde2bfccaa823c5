"""Measure ``koala what-if`` with many waiting jobs, on all processors as in the daemon."""

from random import Random
from time import monotonic

from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.moment import Moment, moment_of
from koalapy.simulation.record.format import People
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid
from koalapy.simulation.twin import HORIZON, Change, Question, answer_what_if

GRID = SimulatedGrid({f"c{number}": SimulatedCluster(nodes) for number, nodes in enumerate((85, 41, 46, 32))})
DAY = 86_400.0


def crowd(jobs: int) -> Moment:
    """Return the state of a full grid as large as DAS-3 with ``jobs`` new jobs, some of which need several clusters."""
    draws, planned = Random(5), []
    for number in range(jobs):
        size = draws.choice([1, 1, 2, 4, 8, 16, 32])
        is_single = size < 4 or draws.random() < 0.6
        request = NonFixedRequest((ComponentRequest(size),)) if is_single else FlexibleRequest(size)
        spec = JobSpec(request, ("program", f"{number % 40}"), walltime=draws.choice([600.0, 1800.0, 3600.0]))
        planned.append(PlannedJob(number * 0.01, spec, draws.expovariate(1 / 300)))
    now = jobs * 0.01 + 1
    simulation = Simulation(GRID, Rules(placement_queue_limit=jobs + 1), until=now)
    simulation.run(planned)
    return moment_of(simulation.scheduler.queries, People(), now)


def what_if_s(jobs: int) -> dict[str, float]:
    """Return the real seconds of a question about another policy, by its horizon."""
    moment = crowd(jobs)
    times = {}
    for name, horizon in (("24 hours", DAY), ("to the end", HORIZON)):
        began = monotonic()
        answer = answer_what_if(Question(moment, Change(policy="cluster-minimization"), builtin_policies, horizon))
        times[name] = monotonic() - began
        started = answer.as_it_is.started
        assert started is not None
        print(f"  {name}: {times[name]:.1f} s, {started.middle:.0f} of {len(moment.jobs)} jobs start", flush=True)
    return times
