"""Schedules: jobs of users and faults, drawn from a seed, and played in a grid in virtual time."""

import asyncio
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from koalapy.api.job_views import JobSubmission
from koalapy.config.settings import ClusterSection, Settings
from tests.databases import empty_database
from tests.proof.clusters import CORES
from tests.proof.grid import ProofGrid, proof_grid
from tests.proof.loop import SingleThreadLoop, repeatable_process

CLUSTERS = ("north", "south")
LEASE_S = 60.0
RULES = {"unreachable_after": 45.0, "claim_grace": 30.0, "plan_after": 10.0}
HORIZON_S = 100.0
"""Virtual seconds in which jobs are submitted and faults begin."""
RECONNECT_S = 10.0
"""Virtual seconds in which agents connect to a new daemon."""
JUMPS_S = (-3600.0, -5.0, 5.0, 3600.0)
AUDIT_DELAY_S = 40.0
"""Virtual seconds between the rest of the grid and its audit, in which late removals end."""


@dataclass(frozen=True, slots=True)
class Element:
    """A job or a fault of a schedule. All its random numbers come from its own name, so that it is the same in a part
    of the schedule.
    """

    name: str
    at: float
    kind: str

    def random(self, seed: int) -> Random:
        return Random(f"{seed} {self.name} details")


DURATIONS_S = {"long": 500.0, "lasting": 200.0, "short": 2.0}
"""Durations of the programs of jobs by kind, of those that are not random."""
JOB_KINDS = (
    "fixed",
    "non-fixed",
    "flexible",
    "array",
    "dependent",
    "urgent",
    "wide",
    "script",
    "reserved",
    "shared",
    "planned",
)
MIXES = (
    JOB_KINDS,
    JOB_KINDS,
    JOB_KINDS,
    ("shared", "shared", "shared", "fixed"),
    ("wide", "wide", "planned", "urgent"),
    ("lasting", "lasting", "shared", "dependent"),
)
"""Kinds among which the jobs of a schedule are drawn: all, those that meet on a node, those that wait long, and those
that run longer than a lease."""
FAULT_KINDS = {
    "cut past the lease": 4,
    "long cut": 2,
    "short cut": 2,
    "broken connection": 2,
    "slow path": 2,
    "agent restart": 4,
    "daemon restart": 3,
    "short daemon restart": 2,
    "commands of an earlier daemon": 2,
    "lost replies": 4,
    "late answers": 2,
    "stale snapshots": 2,
    "rejections": 1,
    "local jobs": 2,
    "node lost": 2,
    "jobs forgotten": 1,
    "job ids reused": 2,
    "agent killed at a step": 4,
    "daemon killed at a step": 4,
    "clock jump": 1,
    "daemon clock jump": 1,
}
"""Kinds by weight: faults that were dangerous in other systems are more frequent."""
DAEMON_FAULTS = (
    "daemon restart",
    "short daemon restart",
    "daemon killed at a step",
    "daemon clock jump",
    "commands of an earlier daemon",
)
MAX_PASSES = 250
"""Passes of the event loop within which a process is killed at a step: as many as a short job needs on an idle grid."""


def draw_schedule(seed: int) -> list[Element]:
    """Return the jobs and faults of a schedule in the order of their times."""
    random = Random(seed)
    job_kinds = random.choice(MIXES)
    elements = [
        Element(f"job{number}", random.uniform(0, 0.7 * HORIZON_S), random.choice(job_kinds))
        for number in range(random.randint(2, 4))
    ]
    kinds, weights = zip(*FAULT_KINDS.items(), strict=True)
    for number in range(random.randint(1, 3)):
        # Half of the faults hit within a few seconds of a submission: hand-overs are dangerous.
        near = random.choice(elements[:1] + [e for e in elements if e.name.startswith("job")]).at
        at = near + random.uniform(0, 1.0) if random.random() < 0.5 else random.uniform(0, HORIZON_S)
        elements.append(Element(f"fault{number}", at, random.choices(kinds, weights)[0]))
    return sorted(elements, key=lambda element: (element.at, element.name))


def draw_dangerous_schedule(seed: int) -> list[Element]:
    """Return a schedule with what planted faults need, at times from the seed: long jobs on both clusters, short jobs
    that have ended when outdated commands arrive, a dependent job, an array, a partition past the lease, restarts of
    agents and daemon. The long jobs leave half of the nodes free, so that a job that must not start can start.
    """
    random = Random(seed)
    jobs = [Element(f"job{number}", random.uniform(0, 5.0), "long") for number in range(4)]
    jobs += [
        Element("job6", 6.0, "dependent"),  # on a long job, since the short ones come later
        Element("job7", 7.0, "array"),
        Element("job8", 8.0, "short"),
        Element("job9", 9.0, "short"),
    ]
    faults = [
        Element("fault0", min(job.at for job in jobs) + 0.3, "short daemon restart"),
        Element("fault1", random.uniform(220.0, 260.0), "long cut"),
        Element("fault2", random.uniform(220.0, 260.0), "agent restart"),
        Element("fault3", random.uniform(24.0, 32.0), "commands of an earlier daemon"),
        Element("fault4", random.uniform(220.0, 260.0), "agent restart"),
        Element("fault5", random.uniform(220.0, 400.0), random.choice(sorted(FAULT_KINDS))),
    ]
    return sorted(jobs + faults, key=lambda element: (element.at, element.name))


# Jobs


def _component(size: int, cluster: str = "") -> dict[str, Any]:
    return {"size": size} | ({"cluster": cluster} if cluster else {})


def make_body(kind: str, random: Random, earlier: int | None) -> dict[str, Any]:
    """Return the body of a submission."""
    sizes = [random.randint(1, 3), random.randint(1, 2)]
    request: dict[str, Any] = {
        "type": "fixed",
        "components": [_component(sizes[0], "north"), _component(sizes[1], "south")],
    }
    if kind in ("non-fixed", "urgent"):
        request = {"type": "nonfixed", "components": [_component(size) for size in sizes]}
    elif kind == "flexible":
        request = {"type": "flexible", "total_size": random.randint(2, 7)}
    elif kind in ("wide", "planned"):
        request["components"] = [_component(4, "north"), _component(3, "south")]
    elif kind in ("array", "dependent", "long", "lasting", "short", "script"):
        request = {"type": "nonfixed", "components": [_component(1)]}
    body: dict[str, Any] = {"request": request, "command": ["true"], "launcher": "processes"}
    if kind == "array":
        body["array"] = f"0-{random.randint(1, 5)}%{random.randint(1, 4)}"
    if kind == "script":
        body |= {"command": ["steps.sh"], "script": "#!/bin/sh\ntrue\ntrue\n", "launcher": "openmpi"}
    if kind == "shared":
        body |= {"share": True, "cores": random.randint(1, CORES - 1)}
    if kind == "planned":
        body["walltime"] = 120.0
    if kind == "urgent":
        body["priority"] = "high"
    if kind == "dependent" and earlier is not None:
        body["after"] = [f"{earlier}:{random.choice(['ok', 'any'])}"]
    return body


async def play_job(grid: ProofGrid, element: Element, acknowledged: dict[str, int]) -> None:
    """Submit a job until the daemon acknowledges it; some are submitted again, and some cancelled."""
    random = element.random(grid.seed)
    earlier = random.choice(sorted(acknowledged.values())) if acknowledged else None
    body = make_body(element.kind, random, earlier)
    duration, code = random.choice([2.0, 10.0, 30.0, 90.0]), random.choice([0, 0, 0, 3])
    repeats, cancel_after = random.random() < 0.3, random.choice([None, None, None, random.uniform(0, 60.0)])
    if (fixed := DURATIONS_S.get(element.kind)) is not None:
        duration, code, repeats, cancel_after = fixed, 0, True, None
    if element.kind == "reserved":
        body["reservation"] = element.name
        request = JobSubmission.model_validate(body | {"reservation": ""}).to_model().request
        if not await grid.reserve(request, element.name, random.uniform(30.0, 300.0)):
            return
    while (job := await grid.submit(body, duration, code, element.name)) is None:  # noqa: ASYNC110
        await asyncio.sleep(2.0)
    if not job:
        return
    acknowledged[element.name] = job
    if repeats:
        await grid.submit(body, duration, code, element.name)
    if cancel_after is not None:
        await asyncio.sleep(cancel_after)
        await grid.cancel(job)


# Faults


async def play_fault(grid: ProofGrid, element: Element) -> None:
    """Do one fault, and end it after its time."""
    random = element.random(grid.seed)
    name = random.choice(CLUSTERS)
    cluster, way = grid.clusters[name], grid.ways[name]
    lasts = random.uniform(5.0, 60.0)
    match element.kind:
        case "cut past the lease" | "long cut" | "short cut":
            way.cut()
            past = {"cut past the lease": random.uniform(0, 3 * LEASE_S), "long cut": 4 * LEASE_S + lasts}
            await asyncio.sleep(lasts / 3 if element.kind == "short cut" else LEASE_S + past[element.kind])
            way.heal()
        case "broken connection":
            way.break_all()
        case "slow path":
            way.slowness_s = random.uniform(0.1, 5.0)
            await asyncio.sleep(lasts)
            way.slowness_s = 0.0
        case "agent restart" | "agent killed at a step":
            if element.kind == "agent killed at a step":
                await grid.loop.run_passes(random.randint(1, MAX_PASSES))
            grid.kill_agent(name)
            await asyncio.sleep(random.choice([0.1, lasts, LEASE_S + lasts]))
            grid.start_agent(name)
        case _ if element.kind in DAEMON_FAULTS:
            if element.kind == "daemon killed at a step":
                await grid.loop.run_passes(random.randint(1, MAX_PASSES))
            if grid.daemon is None:
                return  # another fault has ended it
            sent = {name: len(way.sent) for name, way in grid.ways.items()}
            await grid.crash_daemon()
            if element.kind == "daemon clock jump":
                grid.daemon_clock.offset += random.choice(JUMPS_S)
            is_short = element.kind == "short daemon restart"
            await asyncio.sleep(0.1 if is_short else random.choice([0.1, lasts, LEASE_S + lasts]))
            await grid.start_daemon()
            if element.kind == "commands of an earlier daemon":
                await asyncio.sleep(RECONNECT_S + lasts)
                for name, way in grid.ways.items():
                    way.slowness_s = 5.0
                    way.repeat_commands(sent[name])
                await asyncio.sleep(lasts)
                for way in grid.ways.values():
                    way.slowness_s = 0.0
        case "local jobs":
            cluster.local_use.update(random.sample(cluster.node_names, random.randint(1, 4)))
            await asyncio.sleep(lasts)
            cluster.local_use.clear()
            cluster.start_jobs()
        case "node lost":
            if running := [job for job in cluster.list_unended() if job.nodes]:
                cluster.end_job(random.choice(running), is_cancelled=True)
        case "jobs forgotten":
            cluster.forget_ended()
        case "job ids reused":
            cluster.reuse_ids()
        case "clock jump":
            grid.clocks[name].offset += random.choice(JUMPS_S)
        case _:
            lie, value = {
                "lost replies": ("lose_reply", random.uniform(0.2, 0.9)),
                "late answers": ("late_s", random.uniform(0.5, 20.0)),
                "stale snapshots": ("stale", random.uniform(0.2, 0.9)),
                "rejections": ("reject", random.uniform(0.2, 0.9)),
            }[element.kind]
            setattr(cluster.lies, lie, value)
            await asyncio.sleep(lasts)
            setattr(cluster.lies, lie, 0.0)


# Runs


@cache
def grid_settings() -> Settings:
    sections = {name: ClusterSection(kind="drmaa", token=f"the token of {name}'s agent") for name in CLUSTERS}
    return Settings.model_validate(
        {"rules": RULES, "lease": LEASE_S, "clusters": sections, "record": {"enabled": False}}
    )


@dataclass(slots=True)
class Outcome:
    """What a schedule showed."""

    seed: int
    violations: list[str]
    jobs: int
    attempts: int
    virtual_s: float
    trace: str
    """What the database and the clusters hold at the end; equal for two runs of a seed."""


async def _play(directory: Path, seed: int, elements: Collection[Element]) -> Outcome:
    loop = asyncio.get_running_loop()
    failures: list[str] = []
    async with proof_grid(directory, seed, grid_settings()) as grid:
        await asyncio.sleep(3.0)
        acknowledged: dict[str, int] = {}
        began = loop.time()
        playing = []
        for element in elements:
            await asyncio.sleep(max(0.0, began + element.at - loop.time()))
            is_job = element.name.startswith("job")
            doing = play_job(grid, element, acknowledged) if is_job else play_fault(grid, element)
            playing.append(asyncio.create_task(doing))
            await asyncio.sleep(0)
        await asyncio.gather(*playing)
        await grid.heal()
        failures += await grid.come_to_rest()
        await asyncio.sleep(AUDIT_DELAY_S)
        failures += map(str, grid.find_violations())
        jobs, attempts, trace = grid.describe_end()
        virtual_s = loop.time() - began
    return Outcome(seed, failures, jobs, attempts, virtual_s, trace)


@cache
def prepare_process() -> None:
    """Make once what all schedules use, and exclude it from collections of garbage."""
    empty_database()
    gc.collect()
    gc.freeze()


def run_schedule(
    seed: int,
    without: Collection[str] = (),
    fault: Callable[[], AbstractContextManager[object]] = nullcontext,
    elements: Collection[Element] | None = None,
) -> Outcome:
    """Play a schedule, but some of its elements, in a process that ``fault`` may have changed."""
    chosen = draw_schedule(seed) if elements is None else elements
    folder = Path(tempfile.mkdtemp(prefix="koala-proof-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    loop = SingleThreadLoop()
    prepare_process()
    gc.disable()  # what a schedule leaves is collected at its end, by one full collection
    try:
        directory = folder / "data"
        directory.mkdir(mode=0o700)
        with repeatable_process(loop, seed), fault():
            try:
                return loop.run_until_complete(
                    _play(directory, seed, [element for element in chosen if element.name not in without])
                )
            except Exception as error:  # noqa: BLE001 - whatever ended the daemon or an agent is a violation
                return Outcome(seed, [f"it ended with {error!r}"], 0, 0, 0.0, "")
            finally:
                loop.finish()
    finally:
        gc.enable()
        gc.collect()
        shutil.rmtree(folder, ignore_errors=True)


def shrink_schedule(seed: int) -> list[Element]:
    """Return the elements of a failing schedule without those that its violation does not need."""
    without: set[str] = set()
    names = [element.name for element in draw_schedule(seed)]
    for name in names:
        if run_schedule(seed, {*without, name}).violations:
            without.add(name)
    return [element for element in draw_schedule(seed) if element.name not in without]


def play_schedules(first: int, count: int) -> Iterator[tuple[Outcome, float]]:
    """Yield the outcome of each schedule, with its processor seconds."""
    for seed in range(first, first + count):
        began = time.process_time()
        outcome = run_schedule(seed)
        yield outcome, time.process_time() - began
