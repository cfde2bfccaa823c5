"""Reproduce Figures 3, 4, 6 and 9 of sonmez-2010 at small scale: compare runs on the testbed with simulations.

``python -m tests.experiments.sonmez_2010_live`` runs it on the testbed (``make testbed``) and writes
``experiments/published/live/sonmez-2010.json`` and the page next to it; ``--page`` writes only the page.

A token bucket (tbf) limits the outgoing traffic of each node to other clusters, so that co-allocation costs run time.
Programs sleep instead of computing, because the nodes of a testbed share a few processors.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from experiments.local_users import generate_local_users
from koalapy.api.job_views import JobSubmission
from koalapy.model.cluster import Link
from koalapy.simulation.jobs import Gang, PlannedJob
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import Runner, SimulatedCluster, SimulatedGrid
from koalapy.workload.plan import Arrival, Workload, workload_lines
from koalapy.workload.tables import markdown_table

PAGE = Path(__file__).parents[2] / "experiments" / "published" / "live" / "sonmez-2010.md"
PROGRAM = Path(__file__).parent / "paced_exchange.py"
Json = dict[str, Any]
Placement = dict[str, int]
"""Number of nodes by cluster."""

NODES = {"east": 3, "north": 3, "south": 2}
RATE = 1_000_000.0
"""Bytes per second from a limited node to other clusters."""
STEPS, COMPUTING, COMMUNICATING = 4, 0.25, 1.0
"""Steps of a program, and seconds per step for each phase on fast links."""
NEEDS = {"prime": 0.1, "poisson": 1.5, "wave": 3.5}
"""Bytes per second that a rank of each program sends, as a multiple of ``RATE``; named after the paper's programs."""
SMALL: Sequence[Placement] = (
    {"north": 3},
    {"east": 3},
    {"north": 2, "south": 1},
    {"east": 2, "north": 1},
    {"south": 2, "east": 1},
    {"north": 1, "south": 1, "east": 1},
)
"""Placements of 3 nodes over one, two and three clusters."""
WIDE: Sequence[Placement] = (
    {"north": 2, "south": 2},
    {"north": 3, "south": 1},
    {"north": 3, "east": 1},
    {"east": 2, "south": 2},
)
"""Placements of 4 nodes, more than any cluster has."""
ALL_PAIRS = (("east", "north"), ("east", "south"), ("north", "south"))
TO_EAST = ALL_PAIRS[:2]
LOCAL, LOCAL_SECONDS = 0.2, 10.0
"""Fraction of all nodes used by local users, with one node each, and their mean run time in seconds."""
UTILISATION, OF_WIDE = 0.3, 0.15
"""Net utilisation if each job ran on one cluster, and that of wide jobs if no link was limited."""
LOOK_EVERY = 1.0
"""Seconds between two observations of a simulated agent."""
SEEDS = 30
LATE = 3.0
"""Seconds from the end of a program until its nodes are free; an estimate, used where none was measured."""


@dataclass(frozen=True, slots=True)
class Run:
    """A stream of jobs of one program under one policy."""

    name: str
    application: str
    policy: str
    sizes: tuple[int, ...]
    jobs: int
    options: tuple[tuple[str, str], ...] = ()

    @property
    def is_wide(self) -> bool:
        """Return whether jobs are larger than any cluster and only the links to ``east`` are limited (Figure 9)."""
        return min(self.sizes) > max(NODES.values())

    @property
    def utilisation(self) -> float:
        return OF_WIDE if self.is_wide else UTILISATION

    def workload(self) -> Workload:
        """Generate jobs with the same sizes and arrivals for every run of these sizes."""
        draws, at, arrivals = Random(f"sonmez-2010/{self.sizes}"), 0.0, []
        rate = self.utilisation * sum(NODES.values()) / (fmean(self.sizes) * alone())
        for number in range(self.jobs):
            at += draws.expovariate(rate)
            size = draws.choice(self.sizes)
            arrivals.append(Arrival(at, self.application, self._job(f"{self.application}-{number}", size)))
        header = {"jobs": self.jobs, "policy": self.policy, "grid": NODES, "utilisation": self.utilisation}
        return Workload(header, tuple(arrivals))

    def _job(self, name: str, size: int) -> Json:
        if self.policy == "worst-fit":
            request: Json = {"type": "nonfixed", "components": [{"size": size}]}
        else:
            request = {"type": "flexible", "total_size": size}
        job = {"request": request, "command": command(self.application), "launcher": "openmpi", "name": name}
        return job | {"policy": self.policy, "policy_options": dict(self.options)}


FIGURE_6 = (
    Run("any of them, worst-fit", "prime", "worst-fit", (2, 3), 40),
    *(Run(f"{name}, cluster-minimization", name, "cluster-minimization", (2, 3), 40) for name in NEEDS),
)
FIGURE_9 = (
    Run("wave of 4 nodes, cluster-minimization", "wave", "cluster-minimization", (4,), 20),
    Run("wave of 4 nodes, communication-aware", "wave", "communication-aware", (4,), 20, (("metric", "bandwidth"),)),
)


def alone() -> float:
    """Return the seconds that a program takes on fast links."""
    return STEPS * (COMPUTING + COMMUNICATING)


def command(application: str) -> list[str]:
    pace = (STEPS, COMPUTING, COMMUNICATING, NEEDS[application] * RATE)
    return ["python", "-c", PROGRAM.read_text(encoding="utf-8"), *map(str, pace)]


# Runs on the testbed


def measure() -> Json:
    """Run all measurements on the testbed."""
    from tests.grid.slow_links import limited_links
    from tests.grid.testbed import Testbed

    grid = Testbed().start()

    def held(pairs: Sequence[tuple[str, str]]) -> AbstractContextManager[None]:
        return limited_links(grid, pairs, f"{RATE * 8:.0f}bit") if pairs else nullcontext()

    found: Json = {"processors": os.cpu_count(), "alone": [], "runs": {}}
    with held(()):
        found["alone"] += _each_alone(grid, SMALL, NEEDS, "free")
    with held(ALL_PAIRS):
        found["alone"] += _each_alone(grid, SMALL, NEEDS, "held")
        for run in FIGURE_6:
            found["runs"][run.name] = _stream(grid, run)
    with held(TO_EAST):
        found["alone"] += _each_alone(grid, WIDE, ["wave"], "to east held")
        measured = grid.run_koala("network", "measure", timeout=300)
        assert measured.returncode == 0, measured.stderr
        found["links"] = [
            {name: link[name] for name in ("one", "other", "latency", "bandwidth", "bandwidth_back")}
            for link in grid.http.get("/api/v1/network").json()["links"]
        ]
        for run in FIGURE_9:
            found["runs"][run.name] = _stream(grid, run)
    grid.wait_until_idle()
    grid.close()
    return found | {"load": round(os.getloadavg()[2], 1)}


def _each_alone(
    grid: Any, placements: Sequence[Placement], names: Sequence[str] | Mapping[str, float], links: str
) -> Iterator[Json]:
    for name in names:
        for placement in placements:
            parts = [{"cluster": cluster, "size": nodes} for cluster, nodes in placement.items()]
            request = {"type": "fixed", "components": parts}
            ident = grid.submit(request, *command(name), launcher="openmpi", walltime=300)
            job = grid.wait(ident, 300)
            assert job["state"] == "succeeded", (job["reason"], grid.logs(ident)[-1000:])
            lasted = job["response_time"] - job["wait_time"]
            one = {"application": name, "links": links, "placement": placement, "lasted": lasted}
            print(one, flush=True)
            yield one | {"startup": job["startup_overhead"]}


def _stream(grid: Any, run: Run) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder) / "workload", Path(folder) / "report"
        path.write_text("".join(f"{line}\n" for line in workload_lines(run.workload())), encoding="utf-8")
        background = ("--background", str(LOCAL), "--background-seconds", str(LOCAL_SECONDS), "--background-nodes", "1")
        words = ("--timeout", "1200", "--no-upload", "--directory", str(report))
        ended = grid.run("workload", "run", str(path), *background, *words, timeout=1500)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        told = json.loads((report / "report.json").read_text(encoding="utf-8"))
    summary = told["summary"]
    found = {name: summary[f"{name}_time"] for name in ("wait", "execution", "response")}
    found |= {"coallocated": summary["coallocated"], "startup": summary["startup_overhead"], "ran": summary["ran"]}
    found["local"] = told["utilisation"]["all"]["background"]
    print(run.name, found, flush=True)
    return found


# Simulations


class LateReturns(Simulation):
    """A simulation in which nodes become free some time after the program has ended."""

    seconds = 0.0

    def holding_time(self, runner: Runner, lasts: float) -> float:
        return lasts + self.seconds


@dataclass(frozen=True)
class Twin:
    """A simulation of the testbed that uses run times measured for single programs."""

    found: Json
    returns: float = 0.0
    """Seconds from the end of a program until its nodes are free."""

    def lasted(self, application: str, gang: Sequence[str], links: str) -> float:
        """Return the mean run time of the measured placements over the same number of clusters.

        If only the links to ``east`` are limited, use only placements that agree with ``gang`` in using ``east`` or
        not.
        """
        took = [
            each["lasted"]
            for each in self.found["alone"]
            if (each["application"], each["links"]) == (application, links)
            and len(each["placement"]) == len(gang)
            and (links == "held" or ("east" in each["placement"]) == ("east" in gang))
        ]
        if not took:  # over three clusters, since 4 nodes were measured on two only
            return self.lasted(application, ["east", "north"], links)
        return fmean(took)

    @property
    def startup(self) -> float:
        return median(each["startup"] for each in self.found["alone"])

    def simulate(self, run: Run, seed: int) -> dict[str, float]:
        """Simulate the jobs of a run; the local users depend on the seed."""
        workload, links = run.workload(), "to east held" if run.is_wide else "held"

        def run_time(job: PlannedJob, gang: Gang) -> float:
            return self.lasted(run.application, [cluster for cluster, _ in gang], links) / alone()

        grid = SimulatedGrid(
            {name: SimulatedCluster(nodes) for name, nodes in NODES.items()},
            self._links() if run.is_wide else {},
            startup=self.startup,
            look_every=LOOK_EVERY,
        )
        users = generate_local_users(NODES, LOCAL, duration=3 * workload.lasts, lasts=LOCAL_SECONDS, seed=seed)
        jobs = (
            PlannedJob(each.arrives_at, JobSubmission.model_validate(each.job).to_model(), alone())
            for each in workload.jobs
        )
        simulation = LateReturns(grid, run_time=run_time, local_users=users, seed=seed)
        simulation.seconds = self.returns
        ran = simulation.run(jobs).require_complete().jobs
        wait = fmean(job.waited for job in ran)
        response = fmean(job.response for job in ran) - self.returns
        shares = {"coallocated": fmean(len(job.gang) > 1 for job in ran)}
        return {"wait": wait, "response": response, "execution": response - wait, **shares}

    def _links(self) -> dict[tuple[str, str], Link]:
        links = {}
        for each in self.found["links"]:
            there, back = each["bandwidth"], each["bandwidth_back"]
            links[each["one"], each["other"]] = Link(each["latency"], there)
            links[each["other"], each["one"]] = Link(each["latency"], back or there)
        return links


# Page


def page(found: Json) -> str:
    """Return the page in Markdown."""
    twin = Twin(found)
    simulated = {run.name: [twin.simulate(run, seed) for seed in range(SEEDS)] for run in (*FIGURE_6, *FIGURE_9)}
    late = {
        run.name: [Twin(found, LATE).simulate(run, seed) for seed in range(SEEDS)] for run in (*FIGURE_6, *FIGURE_9)
    }
    six, nine = FIGURE_6[0], FIGURE_9[0]
    return f"""# sonmez-2010, Figures 3, 4, 6 and 9, live

<!-- written by python -m tests.experiments.sonmez_2010_live -->

Real Open MPI jobs on the testbed, three clusters of {_listed_nodes()} nodes
under Slurm and Grid Engine, and the same jobs at the same moments in the simulated world. The nodes of a testbed share
the processors of one machine, so programs here wait in place of computing: in each of {STEPS} steps a rank pauses for
{COMPUTING:g} s and exchanges equal parts with all others, paced to send so many bytes per second for
{COMMUNICATING:g} s if the network takes as much. By what they send they are like the paper's programs: *prime*
{_need("prime")}, *poisson* {_need("poisson")}, *wave* {_need("wave")} MB/s from each node. *Held* links let
{RATE / 1e6:g} MB/s pass from a node to other clusters, by a token bucket (tbf). Load of the machine meanwhile:
{found["load"]:.1f} on {found["processors"]} processors.

<!-- not played: it takes the testbed and half an hour -->
```console
$ python -m tests.experiments.sonmez_2010_live
```

## Figures 3 and 4: execution time by the number of clusters

Jobs of 3 nodes, one at a time; seconds from start to end, the mean over {_count(SMALL)} of so many
clusters, and the least and the most.

{markdown_table(["program", "links", "1 cluster", "2 clusters", "3 clusters"], _by_clusters(found))}

{_figure_3(found)}

## Figure 6: with and without co-allocation

{six.jobs} jobs of 2 or 3 nodes for each line, Poisson arrivals, net utilisation {UTILISATION:.0%}, and local users
with {LOCAL:.0%} of all nodes beside them, one each, for {LOCAL_SECONDS:g} s on average. All links between clusters are
held. *Simulated* is the mean of {SEEDS} simulations, and in brackets what nine of ten of them lie between: in each
local users come at other moments. It is told what single programs took (above), and that a start takes
{twin.startup:.1f} s, the median of those; nothing of the live runs.

{markdown_table(HEAD, [_row(run, found, simulated[run.name]) for run in FIGURE_6])}

{_changes(FIGURE_6, found, simulated)}

## Figure 9: by number of clusters, or by the links between them

{nine.jobs} jobs of 4 nodes, which no cluster has, net utilisation {OF_WIDE:.0%}, and links of which those to east alone
are held. The policy `communication-aware` goes by the bandwidths that `koala network measure` found then, and so does
its simulation.

{markdown_table(HEAD, [_row(run, found, simulated[run.name]) for run in FIGURE_9])}

{_changes(FIGURE_9, found, simulated)}

Of {4 * len(simulated)} live means, {_within(found, simulated)} lie where nine of ten simulated ones do. A run is
{nine.jobs} or {six.jobs} jobs: another would have other means. The simulation gives nodes back in the moment in which
a program ends, and live it takes a while until resource manager and agent have said so, which was not measured. It
matters where jobs last seconds: with {LATE:g} s for it, mean waits would be {_waits(late)} s, and
{_within(found, late)} of the {4 * len(simulated)} means within. Simulated local users come at random, while live ones
are held near {LOCAL:.0%} by what is measured.

The paper's runs had 8 to 64 nodes of 204 or more for four hours each, and no numbers in the text but those of Wave.
"""


HEAD = [
    "",
    "co-allocated",
    "simulated",
    "wait, s",
    "simulated",
    "execution, s",
    "simulated",
    "response, s",
    "simulated",
]
QUANTITIES = ("coallocated", "wait", "execution", "response")


def _listed_nodes() -> str:
    return ", ".join(f"{nodes} ({name})" for name, nodes in NODES.items())


def _need(application: str) -> str:
    return f"{NEEDS[application] * RATE / 1e6:g}"


def _count(placements: Sequence[Placement]) -> str:
    counts = [sum(len(each) == number for each in placements) for number in (1, 2, 3)]
    return f"{counts[0]}, {counts[1]} and {counts[2]} placements"


def _took(found: Json, name: str, links: str, clusters: int) -> list[float]:
    return [
        each["lasted"]
        for each in found["alone"]
        if (each["application"], each["links"], len(each["placement"])) == (name, links, clusters)
    ]


def _by_clusters(found: Json) -> list[list[str]]:
    return [
        [name, links, *(_middle(_took(found, name, links, clusters)) for clusters in (1, 2, 3))]
        for links in ("free", "held")
        for name in NEEDS
    ]


def _middle(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{fmean(values):.1f} ({min(values):.1f} – {max(values):.1f})"


def _figure_3(found: Json) -> str:
    """Describe the numbers of the table of Figure 3."""

    def factor(name: str, links: str) -> float:
        return fmean(_took(found, name, links, 3)) / fmean(_took(found, name, links, 1))

    told = ", ".join(f"{name} {factor(name, 'held'):.2f}" for name in NEEDS)
    free = ", ".join(f"{name} {factor(name, 'free'):.2f}" for name in NEEDS)
    return (
        f"Over three clusters, the time is that on one times {told} on held links, and times {free} on free ones. The "
        "paper's Wave takes 3.75 times as long over four clusters, Poisson a little longer and Prime as long as on one."
    )


def _row(run: Run, found: Json, simulated: Sequence[Mapping[str, float]]) -> list[str]:
    live, row = found["runs"][run.name], [run.name]
    for name in QUANTITIES:
        low, high = _nine_of_ten([each[name] for each in simulated])
        mean = fmean(each[name] for each in simulated)
        if name == "coallocated":
            row += [f"{live[name]:.0%}", f"{mean:.0%} ({low:.0%} – {high:.0%})"]
        else:
            row += [f"{live[name]:.1f}", f"{mean:.1f} ({low:.1f} – {high:.1f})"]
    return row


def _nine_of_ten(values: Sequence[float]) -> tuple[float, float]:
    ordered, left_out = sorted(values), len(values) // 20
    return ordered[left_out], ordered[-1 - left_out]


def _within(found: Json, simulated: Mapping[str, Sequence[Mapping[str, float]]]) -> int:
    count = 0
    for run, some in simulated.items():
        for name in QUANTITIES:
            low, high = _nine_of_ten([each[name] for each in some])
            count += low - 0.005 <= found["runs"][run][name] <= high + 0.005
    return count


def _waits(simulated: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the mean waits in the order of the lines."""
    means = [f"{fmean(each['wait'] for each in some):.1f}" for some in simulated.values()]
    return f"{', '.join(means[:-1])} and {means[-1]}"


def _changes(runs: Sequence[Run], found: Json, simulated: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the changes of the mean response time relative to the first run."""
    first = runs[0].name
    told = []
    for run in runs[1:]:
        live = found["runs"][run.name]["response"] / found["runs"][first]["response"] - 1
        pairs = zip(simulated[run.name], simulated[first], strict=True)
        changes = [one["response"] / other["response"] - 1 for one, other in pairs]
        low, high = _nine_of_ten(changes)
        told.append(f"{run.name} {live:+.0%} live, {fmean(changes):+.0%} simulated ({low:+.0%} to {high:+.0%})")
    return f"Mean response time against *{first}*: {'; '.join(told)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the page again")
    results = PAGE.with_suffix(".json")
    if not parser.parse_args().page:
        results.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(results.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
