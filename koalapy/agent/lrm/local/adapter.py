"""The ``local`` resource manager as agents see it: an embedded cluster run by its own locald."""

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import koalapy
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import RUNNER, AgentSettings
from koalapy.agent.lrm.local.cluster import REQUEST_TIMEOUT, LocalCluster, raise_error
from koalapy.agent.lrm.local.jobs import WALLTIME_EXCEEDED
from koalapy.agent.lrm.node_classes import KnownNode, NodeClassSettings, group_nodes
from koalapy.agent.lrm.port import JOB_PREFIX, Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.agent.runners.runners import secret_files, write_secrets
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable

_ENDED_RETENTION = 10.0
"""Seconds for which an ended job stays in our snapshots; locald itself remembers the last 10,000."""
SETTLING_TIME = 2.0
"""Seconds; locald does at once whatever it is sent."""
_RETRY_DELAY = 0.5
"""Seconds before a locald that could not be reached is tried again."""
_MAX_LINE = 64 << 20
_KEY_SIZE = 32
"""Bytes."""
OWN_USER = "grid"
"""Whose jobs here are those of the agent's own account."""
START_FAILURES_FILE = "start-failures"
"""In the cluster's directory: a probability from 0 to 1 that counts instead of the configured one while it is there."""
NO_CLASSES: Mapping[str, NodeClassSettings] = {}
_FAILING_COMMAND = ("/bin/sh", "-c", "echo 'koala: this start fails on purpose (start_failures)' >&2; exit 1")


def make_lrm(settings: AgentSettings) -> "LocalLrm":
    network = settings.network or "127.0.1"
    cluster = LocalCluster(settings.directory.with_name("lrm"), settings.cluster, settings.nodes, network, RUNNER)
    return LocalLrm(cluster, JOB_PREFIX, settings.start_failures, JobFolders.of(settings), settings.node_classes)


class LocalLrm:
    """Our jobs are those of user ``grid``, or of an account that we act for, whose names begin with ``prefix``;
    everything else is background."""

    def __init__(
        self,
        cluster: LocalCluster,
        prefix: str,
        start_failures: float = 0.0,
        folders: JobFolders | None = None,
        node_classes: Mapping[str, NodeClassSettings] = NO_CLASSES,
    ) -> None:
        """``start_failures``: the probability that a start is made to fail."""
        self._folders = folders or JobFolders.alone()
        self._classes = group_nodes([KnownNode(address) for address in cluster.addresses], node_classes)
        self.cluster = cluster
        self._failures = StartFailures(cluster.directory, cluster.name, start_failures)
        self._prefix = prefix
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False
        self._key: bytes | None = None
        self._ended_since = 0
        self._ended: dict[str, tuple[LrmJob, float]] = {}
        """Ended jobs by id, with the moment until which they are shown."""

    async def open(self) -> None:
        await self._connected()

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        if self._link is not None:
            await self._link.close()

    def runners_key(self) -> bytes | None:
        return self._key

    async def submit_job(self, submission: LrmSubmission) -> str:
        account = await self._account(submission.user)
        link = await self._connected()
        wanted = submission.node_class
        among = self._classes.select_class(wanted, submission.nodes).nodes if wanted else ()
        if submission.user:
            files = {} if self._key else secret_files(submission.secrets)
            await self._folders.fill(submission.user, submission.workdir, files)
        elif not self._key:
            await asyncio.to_thread(write_secrets, submission.workdir, submission.secrets)
        reply = await link.request(
            "submit",
            name=submission.name,
            user=submission.user or OWN_USER,
            account=account,
            nodes=submission.nodes,
            argv=self._failures.command(submission.argv),
            env=dict(submission.environment),
            cwd=str(submission.workdir),
            output=str(submission.output),
            walltime=submission.walltime,
            among=sorted(among),
            secrets=list(submission.secrets) if self._key else [],
        )
        return str(reply["job"])

    async def _account(self, user: str) -> dict[str, Any] | None:
        """As locald is told of it, which must be root to start anything as another."""
        if not user:
            return None
        account = await self._folders.run_as.accounts.find_account(user)
        if os.geteuid() != 0:
            raise SiteRejected(
                f"{self.cluster.name} is run by an agent that is not root, and starts nothing as {user}",
                hint="run its agent as root, or set its identity to own or service",
                fault=SiteFault.SITE,
            )
        return asdict(account)

    async def find_job(self, name: str, user: str = "") -> str | None:
        found = await self._request("find", name=name)
        return str(found["job"]) if found["job"] is not None and found["user"] == (user or OWN_USER) else None

    async def settling_time(self) -> float:
        return SETTLING_TIME

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        try:
            await self._request("cancel", job=job, name=name)
        except SiteRejected as error:
            if error.value != "unknown":  # ended so long ago that it is forgotten
                raise

    async def read_version(self) -> str:
        return f"local of koalapy {koalapy.__version__}"

    async def check_setup(self) -> list[Finding]:
        try:
            seen = await self.take_snapshot()
        except SiteError as error:
            return [Finding("resource manager", False, error.message, "see locald.log in the cluster's directory")]
        return [Finding("resource manager", True, f"embedded, {seen.total} nodes, {seen.idle} idle")]

    async def take_snapshot(self) -> LrmSnapshot:
        link = await self._connected()
        reply = await link.request("list", ended_since=self._ended_since, ended_prefix=self._prefix)
        if link is self._link:
            self._ended_since = max(self._ended_since, reply["seq"])
        out = reply["out"]
        users = {OWN_USER, *await asyncio.to_thread(self._folders.accounts)} if self._folders.are_many else {OWN_USER}
        down = {address for address, state in out.items() if state == "down"}
        jobs: list[LrmJob] = []
        background = 0
        held: set[str] = set()
        for record in reply["jobs"]:
            held.update(record["nodes"] if record["state"] == "running" else ())
            if record["user"] not in users or not record["name"].startswith(self._prefix):
                background += len(set(record["nodes"]) - down) if record["state"] == "running" else 0
            elif record["state"] == "ended":
                self._ended[record["job"]] = (_job_of(record), time.monotonic() + _ENDED_RETENTION)
            else:
                jobs.append(_job_of(record))
        return LrmSnapshot(
            total=reply["total"],
            idle=reply["idle"],
            background=background,
            down=len(down | (out.keys() - held)),
            notices=self._classes.notices,
            node_classes=self._classes.report(lambda nodes: len(nodes - held - out.keys())),
            jobs=(*jobs, *self._ended_jobs()),
        )

    async def watch_changes(self) -> AsyncIterator[None]:
        """Yields at once when the first look is possible, then whenever locald tells of a change or was lost."""
        self._changed.set()
        while not self._closed:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._connected()
            except SiteError:
                self._changed.set()
                await asyncio.sleep(_RETRY_DELAY)
                continue
            if not self._closed:
                yield

    def _ended_jobs(self) -> list[LrmJob]:
        now = time.monotonic()
        while self._ended:
            first = next(iter(self._ended))
            if self._ended[first][1] > now:
                break
            del self._ended[first]
        return [job for job, _ in self._ended.values()]

    async def _request(self, operation: str, **fields: object) -> dict[str, Any]:
        return await (await self._connected()).request(operation, **fields)

    async def _connected(self) -> "_Link":
        if self._link is not None and self._link.alive:
            return self._link
        async with self._connecting:
            if self._closed:
                raise SiteUnavailable(f"cluster {self.cluster.name}: closed")
            if self._link is None or not self._link.alive:
                self._link = await self._connect()
                # This locald may be another one: its counts begin anew.
                self._ended_since = 0
                self._changed.set()
            return self._link

    async def _connect(self) -> "_Link":
        deadline = time.monotonic() + self.cluster.start_timeout
        while True:
            try:
                if link := await self._greet():
                    return link
            except (OSError, SiteUnavailable) as error:
                if time.monotonic() >= deadline:
                    raise SiteUnavailable(f"cluster {self.cluster.name}: locald does not answer: {error}") from error
            await asyncio.to_thread(self.cluster.start)
            await asyncio.sleep(0.01)  # another one may just be letting go of the directory

    async def _greet(self) -> "_Link | None":
        """A link to the locald that runs; None when that was one of other settings, without work, now told to go."""
        async with contextlib.AsyncExitStack() as unfit:
            streams = await asyncio.open_unix_connection(self.cluster.socket_path(), limit=_MAX_LINE)
            link = _Link(*streams, self._changed)
            unfit.push_async_callback(link.close)
            hello = await link.request("hello")
            if self.cluster.matches(hello):
                self._key = await self._kept_key(link) if hello.get("keeps_key") else b""
                await link.request("watch")
                unfit.pop_all()
                return link
            if not (await link.request("shutdown", if_idle=True, if_alone=True))["shutdown"]:
                self.cluster.raise_mismatch(hello)
        return None

    async def _kept_key(self, link: "_Link") -> bytes:
        """What locald was first given, by us or by an agent before us."""
        offered = self._key or os.urandom(_KEY_SIZE)
        return bytes.fromhex((await link.request("keep", key=offered.hex()))["key"])


class StartFailures:
    """Draws, for each start, whether it fails; the same draws in each life of an agent of the same cluster."""

    def __init__(self, directory: Path, cluster: str, probability: float) -> None:
        self._path = directory / START_FAILURES_FILE
        self._default = probability
        self._draws = random.Random(cluster)

    @property
    def probability(self) -> float:
        """As the file says, if there is one with a number in it, else as configured."""
        try:
            return float(self._path.read_text())
        except (OSError, ValueError):
            return self._default

    def command(self, argv: Sequence[str]) -> list[str]:
        """What is to be run in place of a runner: it, or something that takes its nodes and fails at once."""
        return list(_FAILING_COMMAND if self._draws.random() < self.probability else argv)


class _Link:
    """One connection: any number of requests under way, and notices of change in between."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, changed: asyncio.Event) -> None:
        self._reader = reader
        self._writer = writer
        self._changed = changed
        self._asked = 0
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._task = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        return not self._task.done()

    async def request(self, operation: str, **fields: object) -> dict[str, Any]:
        """Raises ``SiteError``."""
        if not self.alive:
            raise SiteUnavailable("locald has gone away")
        self._asked += 1
        id = self._asked
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(json.dumps({"op": operation, "id": id, **fields}).encode() + b"\n")
            async with asyncio.timeout(REQUEST_TIMEOUT):
                answer: dict[str, Any] = await reply
        except TimeoutError as error:
            raise SiteUnavailable(f"locald did not answer within {REQUEST_TIMEOUT:g} s") from error
        finally:
            self._replies.pop(id, None)
        if "error" in answer:
            raise_error(answer)
        return answer

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "changed" in message:
                    self._changed.set()
                elif (reply := self._replies.get(message.get("id"))) and not reply.done():
                    reply.set_result(message)
        except (OSError, ValueError):  # reset, or a line cut off
            pass
        finally:
            self._writer.close()
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(SiteUnavailable("locald has gone away"))
            self._changed.set()


def _job_of(record: dict[str, Any]) -> LrmJob:
    return LrmJob(
        id=record["job"],
        name=record["name"],
        state=LrmJobState(record["state"]),
        nodes=tuple(record["nodes"]),
        exit_code=record["exit_code"],
        lost=record["lost"],
        reason=record["reason"],
        user="" if record["user"] == OWN_USER else record["user"],
        exceeded="walltime" if record["reason"] == WALLTIME_EXCEEDED else "",
    )
