"""A grid with jobs in every state, one of whose clusters is not what it seems; and what must be as it was."""

import hashlib
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2

from koalapy.config.settings import ClusterSection, Settings
from koalapy.model.job import ComponentState, Job, JobId, parse_token
from koalapy.scheduler.effects import Effects
from tests.daemon.archives import archive_of
from tests.fuzz.clusters import NODES, Honest, connected, when
from tests.fuzz.daemon import BEGIN, Watched, administrator, serving
from tests.scheduler import invariants

HOSTILE = "south"
HONEST = ("north", "east")
CLUSTERS = (*HONEST, HOSTILE)
TOKENS = {name: f"the token of {name}'s agent" for name in CLUSTERS}
PATIENCE = 1e6
"""Seconds: no deadline passes while somebody attacks."""
LATER = 100.0
"""Seconds between the daemon that the jobs came to and the one that is attacked."""

OVER, RUNS, COUPLED, CLAIMED, STAGING, QUEUED, HELD = FOREIGN = range(1, 8)
"""Jobs that have nothing to do with the hostile cluster."""
JOINT, OWN, FETCHING = THEIRS = range(8, 11)
"""One that runs there and on north; two that are there alone, one with a file from north."""


def settings() -> Settings:
    rules = dict.fromkeys(("claim_grace", "barrier_timeout", "unreachable_after"), PATIENCE)
    clusters = {name: ClusterSection(kind="drmaa", token=TOKENS[name]) for name in CLUSTERS}
    return Settings.model_validate({"rules": rules, "clusters": clusters, "output_limit": 1000})


def on(*clusters: str, size: int = 1, file: str = "") -> dict[str, Any]:
    """A job with one component on each cluster."""
    inputs = {"inputs": [{"file": file}]} if file else {}
    components = [{"size": size, "cluster": cluster} | inputs for cluster in clusters]
    return {"request": {"type": "fixed", "components": components}, "command": ["true"]}


JOBS = {
    OVER: on("north", file="data") | {"collect": ["**"]},
    RUNS: on("north"),
    COUPLED: on("north", "east"),
    CLAIMED: on("north", "east"),
    STAGING: on("north", file="mesh"),
    QUEUED: on("north", size=NODES),
    HELD: on("east", size=NODES),
    JOINT: on("north", HOSTILE),
    OWN: on(HOSTILE),
    FETCHING: on(HOSTILE, file="mesh"),
}
FILES = {"data": "east", "mesh": "east"}
"""Where each file is."""
FETCHED = "mesh"
"""The file that the hostile cluster is to fetch: the fetching cluster may report that its replica is spoiled."""


class Everything:
    """What a hostile cluster may have told: whatever is asked for."""

    def __contains__(self, _: object) -> bool:
        return True


class Grid:
    """A daemon, its users, two honest clusters, and one more."""

    def __init__(self, daemon: Watched, user: httpx2.AsyncClient, directory: Path) -> None:
        self.daemon, self.user, self.directory = daemon, user, directory
        self.north, self.east = Honest("north"), Honest("east")
        self.gangs = invariants.AttemptHistory()
        self._jobs: dict[JobId, Job] = {job.id: job for job in daemon.queries.jobs()}
        daemon.seen = self._check_effects

    # What people do

    async def submit(self, body: dict[str, Any]) -> JobId:
        answer = await self.user.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    async def show(self, job: JobId) -> dict[str, Any]:
        answer = await self.user.get(f"/api/v1/jobs/{job}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def reaches(self, job: JobId, state: str) -> dict[str, Any]:
        await when(self.daemon, lambda: self._state(job) in (state, ""))
        await self.daemon.settled()
        shown = await self.show(job)
        assert shown["state"] == state, shown
        return shown

    def _state(self, job: JobId) -> str:
        known = self.daemon.queries.job(job)
        return known.state if known else ""

    async def quiet(self) -> None:
        """Return when the honest clusters have carried out all that they were told, and everybody knows."""
        outbox = self.daemon.engine.outbox
        await when(self.daemon, lambda: not any(outbox.count_open(name) for name in HONEST))
        await self.daemon.settled()

    # What must hold

    @property
    def _world(self) -> Any:
        """As much of one as the laws of scheduling ask for."""
        sites = {
            agent.name: SimpleNamespace(
                name=agent.name,
                total=NODES,
                claimed=agent.claimed,
                live_programs=partial(agent.in_phase, ComponentState.RUNNING),
                in_phase=agent.in_phase,
                stages={token: SimpleNamespace(state=stage.state) for token, stage in agent.stages.items()},
                connected=True,
            )
            for agent in (self.north, self.east)
        }
        sites[HOSTILE] = SimpleNamespace(
            name=HOSTILE,
            total=float("inf"),
            claimed=Everything(),
            live_programs=list,
            in_phase=lambda phase: [],
            stages=_AllDone(),
            connected=True,
        )
        daemon = self.daemon
        return SimpleNamespace(
            queries=daemon.queries,
            scheduler=daemon.scheduler,
            jobs=self._jobs,
            gangs=self.gangs,
            now=daemon.clock(),
            rules=daemon.queries.rules,
            sites=sites,
            lost=set(),
            declared_lost=set(),
            forgotten=set(),
        )

    def _check_effects(self, effects: Effects) -> None:
        invariants.check_effects(self._world, effects)
        self._jobs |= effects.jobs

    def check(self) -> None:
        """Of what the scheduler knows and what is stored, once all is written."""
        invariants.check_counts(self._world)
        stored = self.daemon.store.load()
        assert {job.id: job for job in stored.jobs} == {job.id: job for job in self.daemon.queries.jobs()}
        outbox = self.daemon.engine.outbox
        assert {entry.id: entry for entry in stored.outbox} == outbox._entries
        for cluster in CLUSTERS:
            assert outbox.count_open(cluster) == sum(entry.cluster == cluster for entry in stored.outbox)

    async def foreign(self) -> dict[str, Any]:
        """All that there is and that the hostile cluster has nothing to do with: as stored, as kept in files, as shown
        to users."""
        jobs = (await self.user.get("/api/v1/jobs", params={"limit": 1000})).json()["jobs"]
        # Why one waits may change: how many nodes of north are idle is a matter of the job that is on both, too.
        shown: dict[str, Any] = {f"job {job['id']}": job | {"reason": ""} for job in jobs if job["id"] in FOREIGN}
        for what in (f"{OVER}/results", f"{OVER}/logs", f"{RUNS}/logs", f"{COUPLED}/logs"):
            answer = await self.user.get(f"/api/v1/jobs/{what}")
            assert answer.status_code == 200, answer.text
            shown[what] = answer.content
        links = (await self.user.get("/api/v1/network")).json()["links"]
        shown["links"] = [link for link in links if HOSTILE not in (link["one"], link["other"])]
        clusters = [self.daemon.queries.grid[name] for name in HONEST]
        held = {c.name: {t: n for t, n in c.live.items() if parse_token(t).job in FOREIGN} for c in clusters}
        state = {c.name: (c.state, c.total, c.problem, c.drained, repr(c.health)) for c in clusters}
        return {
            "rows": _rows(self.directory),
            "files": _files(self.directory),
            "shown": shown,
            "held": held,
            "state": state,
        }


class _AllDone(dict[str, Any]):
    def get(self, token: str, default: Any = None) -> Any:
        return SimpleNamespace(state="done")


OWN_TABLES = {"lease", "queues", "audit", "audit_chain", "alembic_version", "days"}
"""What is nobody's: the lease counts transactions and the queues scans; who is turned away is written down, and days
add up everybody's jobs, those of the hostile cluster among them."""


def _rows(directory: Path) -> dict[str, list[str]]:
    """Every row of the database but those of the hostile cluster and of its jobs."""
    found: dict[str, list[str]] = {}
    with closing(sqlite3.connect(directory / "koala.db")) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        for table in sorted(set(tables) - OWN_TABLES):
            cursor = database.execute(f'select * from "{table}"')
            columns = [column[0] for column in cursor.description]
            rows = [dict(zip(columns, row, strict=True)) for row in cursor]
            found[table] = sorted(_plain(row) for row in rows if not _theirs(table, row))
    return found


def _theirs(table: str, row: dict[str, Any]) -> bool:
    whose = {row.get("cluster"), row.get("one"), row.get("other"), row["name"] if table == "clusters" else None}
    job = row["id"] if table == "jobs" else row.get("job_id")
    is_fetched = table == "replicas" and row["name"] == FETCHED
    return HOSTILE in whose or job in THEIRS or is_fetched or (table == "outbox" and _of_their_job(row))


def _of_their_job(row: dict[str, Any]) -> bool:
    return int(json.loads(row["payload"])["token"].split(".")[0]) in THEIRS


def _plain(row: dict[str, Any]) -> str:
    """Without what only says when somebody was last there."""
    return repr({name: value for name, value in row.items() if name not in ("last_heard", "used_at", "last_used_at")})


def _files(directory: Path) -> dict[str, str]:
    """The checksum of every file of other jobs."""
    found = {}
    for path in sorted(directory.rglob("*")):
        inside = path.relative_to(directory)
        theirs = len(inside.parts) > 1 and inside.parts[1] in map(str, THEIRS)
        if path.is_file() and inside.parts[0] in ("output", "results", "bundles") and not theirs:
            found[str(inside)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


# How it comes to be


@dataclass(frozen=True)
class Prepared:
    """A grid at rest, to be taken up again as often as somebody likes."""

    directory: Path
    agents: dict[str, Honest]
    gangs: invariants.AttemptHistory

    @asynccontextmanager
    async def taken_up(self, directory: Path) -> AsyncIterator[Grid]:
        """The next daemon on a copy, with the honest clusters connected."""
        shutil.copytree(self.directory, directory)
        async with serving(settings(), directory, BEGIN + LATER) as daemon, administrator(daemon, directory) as user:
            grid = Grid(daemon, user, directory)
            grid.gangs = deepcopy(self.gangs)
            grid.north, grid.east = (self.agent(name) for name in HONEST)
            async with connected(daemon, grid.north), connected(daemon, grid.east):
                await when(daemon, lambda: all(daemon.queries.grid[name].reported for name in HONEST))
                await grid.quiet()
                yield grid
        shutil.rmtree(directory)

    def agent(self, name: str) -> Honest:
        """As it was, on a connection of its own."""
        known, again = self.agents[name], Honest(name)
        for what in ("limits", "stages_held", "components", "sizes", "stages", "claimed"):
            setattr(again, what, deepcopy(getattr(known, what)))
        return again

    @property
    def tokens(self) -> list[str]:
        """Of all components and stages that there ever were."""
        heard = (message for agent in self.agents.values() for message in agent.heard)
        return sorted({message["token"] for message in heard if message["type"] in ("submit", "stage")})


async def prepare(directory: Path) -> Prepared:
    """A data directory with every job where it is to be when the attack begins."""
    async with serving(settings(), directory) as daemon, administrator(daemon, directory) as user:
        grid = Grid(daemon, user, directory)
        south = Honest(HOSTILE)
        limits = {
            RUNS: ComponentState.RUNNING,
            COUPLED: ComponentState.RUNNING,
            JOINT: ComponentState.RUNNING,
            CLAIMED: ComponentState.CLAIMED,
            OWN: ComponentState.WAITING,
        }
        for agent in (grid.north, grid.east, south):
            agent.limits |= limits
            agent.stages_held |= {STAGING, FETCHING}
        grid.east.limits[CLAIMED] = ComponentState.WAITING
        async with AsyncExitStack() as stack:
            for agent in (grid.north, grid.east, south):
                await stack.enter_async_context(connected(daemon, agent))
            await when(daemon, lambda: all(cluster.reported for cluster in daemon.queries.grid.clusters()))
            for file, cluster in FILES.items():
                answer = await user.post(
                    "/api/v1/replicas", json={"name": file, "cluster": cluster, "path": f"/{file}"}
                )
                assert answer.status_code == 201, answer.text
            for job, body in JOBS.items():
                assert await grid.submit(body) == job
                if job == OVER:
                    await _bring_results(grid)
            await user.post(f"/api/v1/jobs/{HELD}/hold", json={})
            await grid.reaches(RUNS, "running")
            await grid.reaches(COUPLED, "running")
            await grid.reaches(JOINT, "running")
            await grid.reaches(QUEUED, "queued")
            await grid.reaches(HELD, "held")
            for agent in (grid.north, grid.east, south):
                await when(daemon, lambda agent=agent: not daemon.engine.outbox.count_open(agent.name))  # type: ignore[misc]
                running = agent.in_phase(ComponentState.RUNNING)
                await when(daemon, lambda agent=agent, running=running: all(map(agent.acknowledged.get, running)))  # type: ignore[misc]
            await grid.quiet()
            grid.check()
            agents = {agent.name: agent for agent in (grid.north, grid.east, south)}
    return Prepared(directory, agents, grid.gangs)


async def _bring_results(grid: Grid) -> None:
    await grid.reaches(OVER, "succeeded")
    attempts = (await grid.user.get(f"/api/v1/jobs/{OVER}/attempts")).json()["attempts"]
    assert attempts
    token = next(m["token"] for m in grid.north.heard if m["type"] == "stage")
    answer = await grid.user.put(
        f"/api/v1/agents/north/results/{token}",
        content=archive_of({"result": b"genuine"}),
        headers={"Authorization": f"Bearer {TOKENS['north']}"},
    )
    assert answer.status_code == 200, answer.text
