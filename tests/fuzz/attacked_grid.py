"""A grid with jobs in every state and one hostile cluster, and the data that must stay unchanged."""

import hashlib
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2

from koalapy.config.settings import ClusterSection, Settings
from koalapy.model.cluster import NO_RELAYS
from koalapy.model.job import ComponentState, Job, JobId, parse_token
from koalapy.scheduler.cluster_conditions import ClaimEvidence
from koalapy.scheduler.effects import Effects
from koalapy.store.records import OutboxEntry
from tests.daemon.archives import archive_of
from tests.fuzz.clusters import NODE_COUNT, HonestAgent, connected_agent, wait_until
from tests.fuzz.daemon import START_TIME, WatchedDaemon, admin_client, running_daemon
from tests.scheduler import invariants

HOSTILE = "south"
HONEST = ("north", "east")
CLUSTERS = (*HONEST, HOSTILE)
TOKENS = {name: f"the token of {name}'s agent" for name in CLUSTERS}
LONG_TIMEOUT_S = 1e6
"""Timeouts that do not expire during an attack."""
RESTART_PAUSE_S = 100.0
"""Seconds between the run of the daemon that prepared the jobs and the attacked one."""

ENDED, RUNNING, COUPLED, CLAIMED, STAGING, QUEUED, HELD = UNRELATED_JOBS = range(1, 8)
"""Jobs without a component on the hostile cluster."""
JOINT, HOSTILE_ONLY, FETCHING = HOSTILE_JOBS = range(8, 11)
"""Jobs on the hostile cluster: one also on north, and two on it alone, one of them with an input file."""


def settings() -> Settings:
    rules = dict.fromkeys(("claim_grace", "barrier_timeout", "unreachable_after", "plan_after"), LONG_TIMEOUT_S)
    clusters = {name: ClusterSection(kind="drmaa", token=TOKENS[name]) for name in CLUSTERS}
    return Settings.model_validate({"rules": rules, "clusters": clusters, "output_limit": 1000})


def job_on(*clusters: str, size: int = 1, file: str = "") -> dict[str, Any]:
    """Return the body of a job with one component on each cluster."""
    inputs = {"inputs": [{"file": file}]} if file else {}
    components = [{"size": size, "cluster": cluster} | inputs for cluster in clusters]
    return {"request": {"type": "fixed", "components": components}, "command": ["true"]}


JOBS = {
    ENDED: job_on("north", file="data") | {"collect": ["**"]},
    RUNNING: job_on("north"),
    COUPLED: job_on("north", "east"),
    CLAIMED: job_on("north", "east"),
    STAGING: job_on("north", file="mesh"),
    QUEUED: job_on("north", size=NODE_COUNT),
    HELD: job_on("east", size=NODE_COUNT),
    JOINT: job_on("north", HOSTILE),
    HOSTILE_ONLY: job_on(HOSTILE) | {"cores": 1, "share": True},
    FETCHING: job_on(HOSTILE, file="mesh"),
}
FILES = {"data": "east", "mesh": "east"}
"""The cluster of each file."""
FETCHED_FILE = "mesh"
"""The file that the hostile cluster fetches. The fetching cluster may report its replica as damaged."""


def _as_stored(entries: Iterable[OutboxEntry]) -> dict[int, OutboxEntry]:
    """Return commands by id, with lists in place of tuples of JSON."""
    return {entry.id: replace(entry, payload={k: _to_json(v) for k, v in entry.payload.items()}) for entry in entries}


def _to_json(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, dict) else value


class AnyToken:
    """A set that contains every token, for a cluster that may report anything."""

    def __contains__(self, _: object) -> bool:
        return True


class AttackedGrid:
    """A daemon, a user, two honest clusters, and the connection to a hostile one."""

    def __init__(self, daemon: WatchedDaemon, user: httpx2.AsyncClient, directory: Path) -> None:
        self.daemon, self.user, self.directory = daemon, user, directory
        self.north, self.east = HonestAgent("north"), HonestAgent("east")
        self.gangs = invariants.AttemptHistory()
        self._jobs: dict[JobId, Job] = {job.id: job for job in daemon.queries.jobs()}
        daemon.on_effects = self._check_effects

    # Requests of users

    async def submit_job(self, body: dict[str, Any]) -> JobId:
        answer = await self.user.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    async def get_job(self, job: JobId) -> dict[str, Any]:
        answer = await self.user.get(f"/api/v1/jobs/{job}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def wait_for_state(self, job: JobId, state: str) -> dict[str, Any]:
        await wait_until(self.daemon, lambda: self._state(job) in (state, ""))
        await self.daemon.wait_until_settled()
        fields = await self.get_job(job)
        assert fields["state"] == state, fields
        return fields

    def _state(self, job: JobId) -> str:
        record = self.daemon.queries.job(job)
        return record.state if record else ""

    async def wait_until_quiet(self) -> None:
        """Wait until the honest clusters have acknowledged all commands."""
        outbox = self.daemon.engine.outbox
        await wait_until(self.daemon, lambda: not any(outbox.count_open(name) for name in HONEST))
        await self.daemon.wait_until_settled()

    # Invariants

    @property
    def _model(self) -> Any:
        """Return the attributes of a simulated grid that the scheduling invariants use."""
        sites = {
            agent.name: SimpleNamespace(
                name=agent.name,
                total=NODE_COUNT,
                claimed=agent.claimed,
                live_programs=partial(agent.list_in_state, ComponentState.RUNNING),
                in_phase=agent.list_in_state,
                stages={token: SimpleNamespace(state=stage.state) for token, stage in agent.stages.items()},
                connected=True,
            )
            for agent in (self.north, self.east)
        }
        sites[HOSTILE] = SimpleNamespace(
            name=HOSTILE,
            total=float("inf"),
            claimed=AnyToken(),
            live_programs=list,
            in_phase=lambda phase: [],
            stages=_AnyStage(),
            connected=True,
        )
        daemon = self.daemon
        return SimpleNamespace(
            queries=daemon.queries,
            scheduler=daemon.scheduler,
            jobs=self._jobs,
            gangs=self.gangs,
            now=daemon.clock.now(),
            rules=daemon.queries.rules,
            relays=NO_RELAYS,
            sites=sites,
            lost=set(),
            declared_lost=set(),
            forgotten=set(),
        )

    def _check_effects(self, effects: Effects) -> None:
        invariants.check_effects(self._model, effects)
        self._jobs |= effects.jobs

    def check_consistency(self) -> None:
        """Check that the scheduler's state is consistent and equals the stored one."""
        invariants.check_counts(self._model)
        stored = self.daemon.store.load()
        assert {job.id: job for job in stored.jobs} == {job.id: job for job in self.daemon.queries.jobs()}
        outbox = self.daemon.engine.outbox
        assert _as_stored(stored.outbox) == _as_stored(outbox._entries.values())
        for cluster in CLUSTERS:
            assert outbox.count_open(cluster) == sum(entry.cluster == cluster for entry in stored.outbox)

    async def read_unrelated_data(self) -> dict[str, Any]:
        """Return all data unrelated to the hostile cluster: rows, files, and answers of the API."""
        jobs = (await self.user.get("/api/v1/jobs", params={"limit": 1000})).json()["jobs"]
        # The reason of a waiting job may change, since the idle nodes of north depend on the job on both clusters.
        answers: dict[str, Any] = {
            f"job {job['id']}": job | {"reason": ""} for job in jobs if job["id"] in UNRELATED_JOBS
        }
        for page in (f"{ENDED}/results", f"{ENDED}/logs", f"{RUNNING}/logs", f"{COUPLED}/logs"):
            answer = await self.user.get(f"/api/v1/jobs/{page}")
            assert answer.status_code == 200, answer.text
            answers[page] = answer.content
        links = (await self.user.get("/api/v1/network")).json()["links"]
        answers["links"] = [link for link in links if HOSTILE not in (link["one"], link["other"])]
        clusters = [self.daemon.queries.grid[name] for name in HONEST]
        held_nodes = {
            cluster.name: {
                token: count for token, count in cluster.nodes.live.items() if parse_token(token).job in UNRELATED_JOBS
            }
            for cluster in clusters
        }
        state = {
            cluster.name: (
                cluster.state,
                cluster.last_report.total,
                cluster.last_report.problem,
                cluster.drained,
                repr(replace(cluster.health, evidence=ClaimEvidence())),
            )
            for cluster in clusters
        }
        return {
            "rows": _read_rows(self.directory),
            "files": _checksum_files(self.directory),
            "shown": answers,
            "held": held_nodes,
            "state": state,
        }


class _AnyStage(dict[str, Any]):
    def get(self, token: str, default: Any = None) -> Any:
        return SimpleNamespace(state="done")


IGNORED_TABLES = {"lease", "queues", "audit", "audit_chain", "alembic_version", "days"}
"""Tables that change without relation to jobs: transactions of the lease, scans, audit entries of rejections, and daily
sums over all jobs."""


def _read_rows(directory: Path) -> dict[str, list[str]]:
    """Return all rows by table, except those of the hostile cluster and its jobs."""
    rows_by_table: dict[str, list[str]] = {}
    with closing(sqlite3.connect(directory / "koala.db")) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        for table in sorted(set(tables) - IGNORED_TABLES):
            cursor = database.execute(f'select * from "{table}"')
            columns = [column[0] for column in cursor.description]
            rows = [dict(zip(columns, row, strict=True)) for row in cursor]
            rows_by_table[table] = sorted(_describe_row(row) for row in rows if not _is_of_hostile_cluster(table, row))
    return rows_by_table


def _is_of_hostile_cluster(table: str, row: dict[str, Any]) -> bool:
    clusters = {row.get("cluster"), row.get("one"), row.get("other"), row["name"] if table == "clusters" else None}
    job = row["id"] if table == "jobs" else row.get("job_id")
    is_fetched = table == "replicas" and row["name"] == FETCHED_FILE
    return HOSTILE in clusters or job in HOSTILE_JOBS or is_fetched or (table == "outbox" and _is_for_hostile_job(row))


def _is_for_hostile_job(row: dict[str, Any]) -> bool:
    return int(json.loads(row["payload"])["token"].split(".")[0]) in HOSTILE_JOBS


def _describe_row(row: dict[str, Any]) -> str:
    """Return a row as text without its times of last contact."""
    return repr({name: value for name, value in row.items() if name not in ("last_heard", "used_at", "last_used_at")})


def _checksum_files(directory: Path) -> dict[str, str]:
    """Return the checksums of all files of unrelated jobs."""
    checksums = {}
    for path in sorted(directory.rglob("*")):
        inside = path.relative_to(directory)
        is_hostile = len(inside.parts) > 1 and inside.parts[1] in map(str, HOSTILE_JOBS)
        if path.is_file() and inside.parts[0] in ("output", "results", "bundles") and not is_hostile:
            checksums[str(inside)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return checksums


# Preparation


@dataclass(frozen=True)
class PreparedGrid:
    """A prepared data directory, from which any number of grids can be started."""

    directory: Path
    agents: dict[str, HonestAgent]
    gangs: invariants.AttemptHistory

    @asynccontextmanager
    async def resumed_grid(self, directory: Path) -> AsyncIterator[AttackedGrid]:
        """Run a daemon on a copy of the directory, with the honest clusters connected."""
        shutil.copytree(self.directory, directory)
        async with (
            running_daemon(settings(), directory, START_TIME + RESTART_PAUSE_S) as daemon,
            admin_client(daemon, directory) as user,
        ):
            grid = AttackedGrid(daemon, user, directory)
            grid.gangs = deepcopy(self.gangs)
            grid.north, grid.east = (self.copy_agent(name) for name in HONEST)
            async with connected_agent(daemon, grid.north), connected_agent(daemon, grid.east):
                await wait_until(daemon, lambda: all(daemon.queries.grid[name].nodes.reported for name in HONEST))
                await grid.wait_until_quiet()
                yield grid
        shutil.rmtree(directory)

    def copy_agent(self, name: str) -> HonestAgent:
        """Return a copy of an agent without its connection."""
        original, copy = self.agents[name], HonestAgent(name)
        for attribute in ("limits", "stages_held", "components", "sizes", "stages", "claimed"):
            setattr(copy, attribute, deepcopy(getattr(original, attribute)))
        return copy

    @property
    def tokens(self) -> list[str]:
        """Return the tokens of all components and stages."""
        heard = (message for agent in self.agents.values() for message in agent.heard)
        return sorted({message["token"] for message in heard if message["type"] in ("submit", "stage")})


async def prepare_grid(directory: Path) -> PreparedGrid:
    """Prepare a data directory in which every job has the state in which the attack begins."""
    async with running_daemon(settings(), directory) as daemon, admin_client(daemon, directory) as user:
        grid = AttackedGrid(daemon, user, directory)
        south = HonestAgent(HOSTILE)
        limits = {
            RUNNING: ComponentState.RUNNING,
            COUPLED: ComponentState.RUNNING,
            JOINT: ComponentState.RUNNING,
            CLAIMED: ComponentState.CLAIMED,
            HOSTILE_ONLY: ComponentState.WAITING,
        }
        for agent in (grid.north, grid.east, south):
            agent.limits |= limits
            agent.stages_held |= {STAGING, FETCHING}
        grid.east.limits[CLAIMED] = ComponentState.WAITING
        async with AsyncExitStack() as stack:
            for agent in (grid.north, grid.east, south):
                await stack.enter_async_context(connected_agent(daemon, agent))
            await wait_until(daemon, lambda: all(cluster.nodes.reported for cluster in daemon.queries.grid.clusters()))
            for file, cluster in FILES.items():
                answer = await user.post(
                    "/api/v1/replicas", json={"name": file, "cluster": cluster, "path": f"/{file}"}
                )
                assert answer.status_code == 201, answer.text
            for job, body in JOBS.items():
                assert await grid.submit_job(body) == job
                if job == ENDED:
                    await _upload_results(grid)
            await user.post(f"/api/v1/jobs/{HELD}/hold", json={})
            await grid.wait_for_state(RUNNING, "running")
            await grid.wait_for_state(COUPLED, "running")
            await grid.wait_for_state(JOINT, "running")
            await grid.wait_for_state(QUEUED, "queued")
            await grid.wait_for_state(HELD, "held")
            for agent in (grid.north, grid.east, south):
                await wait_until(daemon, lambda agent=agent: not daemon.engine.outbox.count_open(agent.name))  # type: ignore[misc]
                running = agent.list_in_state(ComponentState.RUNNING)
                await wait_until(daemon, lambda agent=agent, running=running: all(map(agent.acknowledged.get, running)))  # type: ignore[misc]
            await grid.wait_until_quiet()
            grid.check_consistency()
            agents = {agent.name: agent for agent in (grid.north, grid.east, south)}
    return PreparedGrid(directory, agents, grid.gangs)


async def _upload_results(grid: AttackedGrid) -> None:
    await grid.wait_for_state(ENDED, "succeeded")
    attempts = (await grid.user.get(f"/api/v1/jobs/{ENDED}/attempts")).json()["attempts"]
    assert attempts
    token = next(m["token"] for m in grid.north.heard if m["type"] == "stage")
    answer = await grid.user.put(
        f"/api/v1/agents/north/results/{token}",
        content=archive_of({"result": b"genuine"}),
        headers={"Authorization": f"Bearer {TOKENS['north']}"},
    )
    assert answer.status_code == 200, answer.text
