"""Adapter of the ``local`` resource manager: an embedded cluster with its own locald."""

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import koalapy
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import RUNNER, AgentSettings
from koalapy.agent.lrm.local.cluster import REQUEST_TIMEOUT_S, LocalCluster, raise_error
from koalapy.agent.lrm.local.jobs import WALLTIME_EXCEEDED, Part
from koalapy.agent.lrm.local.processes import SOCKET_NAME
from koalapy.agent.lrm.node_classes import NO_PARTS, KnownNode, NodeClassSettings, NodePart, group_nodes
from koalapy.agent.lrm.port import (
    JOB_PREFIX,
    Finding,
    Lrm,
    LrmJob,
    LrmJobState,
    LrmSnapshot,
    LrmSubmission,
    ReservationOrder,
    report_reservations,
)
from koalapy.agent.lrm.rejections import reject_fields, reservation_rejection
from koalapy.agent.runners.runners import secret_files, write_secrets
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.node_requirement import Gpus, NodeRequirement, count_gpus
from koalapy.model.reports import ListedState
from koalapy.runner.folders import short_socket_path

_ENDED_RETENTION_S = 10.0
"""How long snapshots contain an ended job; locald itself retains the last 10,000."""
SETTLING_TIME_S = 2.0
_RETRY_DELAY_S = 0.5
_CONNECT_INTERVAL_S = 0.02
_MAX_LINE_BYTES = 64 << 20
_KEY_BYTES = 32
OWN_USER = "grid"
"""The local user of jobs that run as the agent's own account."""
START_FAILURES_FILE = "start-failures"
"""A file in the cluster's directory with a probability from 0 to 1, which replaces the configured one."""
_NO_CLASSES: Mapping[str, NodeClassSettings] = {}
_FAILING_COMMAND = ("/bin/sh", "-c", "echo 'koala: this start fails on purpose (start_failures)' >&2; exit 1")


def make_lrm(settings: AgentSettings) -> "LocalLrm":
    network = settings.network or "127.0.1"
    cluster = LocalCluster(settings.directory.with_name("lrm"), settings.cluster, settings.nodes, network, RUNNER)
    return LocalLrm(
        cluster,
        JOB_PREFIX,
        settings.start_failures,
        JobFolders.from_settings(settings),
        settings.node_classes,
        share=settings.share,
    )


class LocalLrm(Lrm):
    """An embedded cluster.

    Grid jobs belong to the user ``grid``, or to the account that they run as, and their names begin with ``prefix``.
    All other jobs are background load.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        prefix: str,
        start_failures: float = 0.0,
        folders: JobFolders | None = None,
        node_classes: Mapping[str, NodeClassSettings] = _NO_CLASSES,
        *,
        share: bool = False,
    ) -> None:
        """``start_failures``: the probability that a start is made to fail. ``share``: whether jobs may share nodes."""
        self._share = share
        self._folders = folders or JobFolders.for_own_account()
        self._classes = group_nodes([KnownNode(address) for address in cluster.addresses], node_classes)
        self.cluster = cluster
        self._failures = StartFailures(cluster.directory, cluster.name, start_failures)
        self._prefix = prefix
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False
        self._key: bytes | None = None
        self._ended_seq = 0
        """Sequence number of locald up to which ended jobs have been read."""
        self._ended: dict[str, tuple[LrmJob, float]] = {}
        """Ended jobs by id, with the time until which snapshots contain them."""

    async def open(self) -> None:
        await self._connect()

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        if self._link is not None:
            await self._link.close()

    def runners_key(self) -> bytes | None:
        return self._key

    async def submit_job(self, submission: LrmSubmission) -> str:
        account: dict[str, Any] | None = None
        if submission.user:
            account = asdict(await self._folders.run_as.accounts.find_account(submission.user))
            if os.geteuid() != 0:
                raise SiteRejected(
                    f"the agent of {self.cluster.name} is not root, and cannot start processes as {submission.user}",
                    hint="run the agent as root, or set the cluster's identity to own or service",
                    fault=SiteFault.SITE,
                )
        link = await self._connect()
        reject_fields(submission.requirement, ("account", "qos"), "an embedded cluster has no {field} {value}")
        addresses = self.cluster.addresses
        names = {address: f"{self.cluster.name}-{number}" for number, address in enumerate(addresses, 1)}
        eligible = self._classes.admitted_nodes(
            submission.node_class, submission.requirement, submission.nodes, addresses, names
        )
        if submission.user:
            files = {} if self._key else secret_files(submission.secrets)
            await self._folders.make_folder(submission.user, submission.workdir, files)
        elif not self._key:
            await asyncio.to_thread(write_secrets, submission.workdir, submission.secrets)
        try:
            reply = await link.request(
                "submit",
                name=submission.name,
                user=submission.user or OWN_USER,
                account=account,
                nodes=submission.nodes,
                argv=self._failures.choose_command(submission.argv),
                env=dict(submission.environment),
                cwd=str(submission.workdir),
                output=str(submission.output),
                walltime=submission.walltime,
                eligible=sorted(eligible or ()),
                parts=self._parts_for(submission.requirement),
                reservation=submission.reservation,
                secrets=list(submission.secrets) if self._key else [],
            )
        except SiteRejected as error:
            if error.value == "reservation":
                raise reservation_rejection(error.message, submission.reservation) from error
            raise
        return str(reply["job"])

    def _parts_for(self, requirement: NodeRequirement) -> dict[str, Part]:
        """Return what a job that shares nodes takes of each node, as locald expects it; empty for other jobs."""
        if not (self._share and requirement.share and requirement.cores):
            return {}
        parts = {}
        for group in self._classes.groups:
            if group.cores is None or not requirement.is_met_by(group):
                continue
            part: Part = {"cores": (requirement.cores, group.cores)}
            if per_core := group.memory_per_core:
                part["memory"] = (requirement.memory or per_core * requirement.cores, group.memory)
            if gpus := requirement.gpus:
                part["gpus"] = (gpus.count, count_gpus(group.gpus, ""))
                for entry in group.gpus:  # which of the types an untyped request gets is not recorded
                    if gpus.type in ("", entry.type):
                        part[f"gpus:{entry.type}"] = (gpus.count, entry.count if gpus.type else None)
            parts.update(dict.fromkeys(group.nodes, part))
        return parts

    def _used_parts(self, records: Sequence[dict[str, Any]]) -> dict[str, NodePart]:
        """Return the used part of each node that running jobs share."""
        used: dict[str, Counter[str]] = {}
        exclusive: set[str] = set()
        for record in records:
            if record["state"] == "running":
                parts = record.get("parts", {})  # none from a locald of an earlier version
                exclusive.update(set(record["nodes"]) - parts.keys())
                for address, part in parts.items():
                    used.setdefault(address, Counter()).update(part)
        return {
            address: NodePart(
                amounts["cores"],
                amounts["memory"],
                tuple(Gpus(n, key.partition(":")[2]) for key, n in amounts.items() if key.startswith("gpus:")),
            )
            for address, amounts in used.items()
            if address not in exclusive
        }

    async def find_job(self, name: str, user: str = "") -> str | None:
        record = await (await self._connect()).request("find", name=name)
        is_found = record["job"] is not None and record["user"] == (user or OWN_USER)
        return str(record["job"]) if is_found else None

    async def settling_time(self) -> float:
        return SETTLING_TIME_S

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        try:
            await (await self._connect()).request("cancel", job=job, name=name)
        except SiteRejected as error:
            if error.value != "unknown":  # ended so long ago that locald has forgotten it
                raise

    async def read_version(self) -> str:
        return f"local of koalapy {koalapy.__version__}"

    async def check_setup(self) -> list[Finding]:
        try:
            snapshot = await self.take_snapshot()
        except SiteError as error:
            return [Finding("resource manager", False, error.message, "see locald.log in the cluster's directory")]
        return [Finding("resource manager", True, f"embedded, {snapshot.total} nodes, {snapshot.idle} idle")]

    async def reserve_nodes(self, order: ReservationOrder) -> Sequence[str]:
        users = [account or OWN_USER for account in order.accounts]
        try:
            reply = await (await self._connect()).request("reserve", **asdict(order), users=users)
        except SiteRejected as error:
            if error.message.startswith("op: "):
                text = f"the locald of {self.cluster.name} is of an earlier version, which reserves no nodes"
                raise SiteRejected(
                    text, hint="stop the grid when the cluster has no jobs, and start it again"
                ) from error
            raise
        return [str(node) for node in reply["nodes"]]

    async def release_reservation(self, name: str) -> None:
        await (await self._connect()).request("unreserve", name=name)

    async def list_reservations(self, prefix: str) -> Sequence[str]:
        reply = await (await self._connect()).request("list", ended_since=self._ended_seq)
        return [entry["name"] for entry in reply["reservations"] if entry["name"].startswith(prefix)]

    async def take_snapshot(self) -> LrmSnapshot:
        link = await self._connect()
        reply = await link.request("list", ended_since=self._ended_seq, ended_prefix=self._prefix)
        users = {OWN_USER}  # after the jobs, whose accounts have had folders before
        if self._folders.is_mapped:
            users |= await asyncio.to_thread(self._folders.list_accounts)
        if link is self._link:  # last: after an error, the next snapshot gets the same ended jobs
            self._ended_seq = max(self._ended_seq, reply["seq"])
        jobs: list[LrmJob] = []
        states: dict[str, ListedState] = dict.fromkeys(self.cluster.addresses, "idle")
        for record in reply["jobs"]:
            nodes = record["nodes"] if record["state"] == "running" else ()
            is_local = record["user"] not in users or not record["name"].startswith(self._prefix)
            for node in nodes:
                if states[node] != "held":  # jobs of several daemons may share it
                    states[node] = "local" if is_local else "held"
            if is_local:
                continue
            if record["state"] == "ended":
                self._ended[record["job"]] = (_job_from_record(record), time.monotonic() + _ENDED_RETENTION_S)
            else:
                jobs.append(_job_from_record(record))
        reservations = reply.get("reservations", [])  # none from a locald of an earlier version
        reasons = {}
        for entry in reservations:
            for node in entry["nodes"] if entry["begins"] <= time.time() else ():
                if states[node] == "idle":
                    states[node], reasons[node] = "local", f"reserved: {entry['name']}"
        now = time.monotonic()
        self._ended = {id: entry for id, entry in self._ended.items() if entry[1] > now}
        used = self._used_parts(reply["jobs"]) if self._share else NO_PARTS
        all_jobs = (*jobs, *(job for job, _ in self._ended.values()))
        snapshot = self._classes.make_snapshot(states, reasons, all_jobs, used)
        idle = {node for node, state in states.items() if state == "idle"}
        uses = ((entry["name"], entry["nodes"], entry["begins"], entry["ends"]) for entry in reservations)
        return replace(snapshot, shares=self._share, reservations=report_reservations(uses, states.keys(), idle))

    async def watch_changes(self) -> AsyncIterator[None]:
        """Yield when the first snapshot is possible, then whenever locald reports a change or was lost."""
        self._changed.set()
        while not self._closed:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._connect()
            except SiteError:
                self._changed.set()
                await asyncio.sleep(_RETRY_DELAY_S)
                continue
            if not self._closed:
                yield

    async def _connect(self) -> "_Link":
        """Return the connection to locald, which is started if it does not run. Raise ``SiteError``."""
        if self._link is not None and self._link.is_alive:
            return self._link
        async with self._connecting:
            deadline = time.monotonic() + self.cluster.start_timeout
            while self._link is None or not self._link.is_alive:
                if self._closed:
                    raise SiteUnavailable(
                        f"cluster {self.cluster.name}: its agent is stopping and opens no connection to locald"
                    )
                try:
                    self._link = await self._open_link()
                except (OSError, SiteUnavailable) as error:
                    if time.monotonic() >= deadline:
                        text = f"cluster {self.cluster.name}: locald does not answer: {error}"
                        raise SiteUnavailable(text) from error
                else:
                    # This locald may be another one, which counts from zero.
                    self._ended_seq = 0
                    self._changed.set()
                    break
                await asyncio.to_thread(self.cluster.start)
                await asyncio.sleep(_CONNECT_INTERVAL_S)  # another locald may be starting or ending
            return self._link

    async def _open_link(self) -> "_Link":
        """Connect to the locald that runs. Raise ``SiteError``.

        One with other settings is stopped if it has no jobs and no other clients; ``SiteRejected`` if it has.
        """
        cluster = self.cluster
        async with contextlib.AsyncExitStack() as on_failure:
            with short_socket_path(cluster.directory / SOCKET_NAME) as path:
                streams = await asyncio.open_unix_connection(path, limit=_MAX_LINE_BYTES)
            link = _Link(*streams, self._changed)
            on_failure.push_async_callback(link.close)
            hello = await link.request("hello")
            if (hello["cluster"], hello["nodes"], hello["network"]) == (cluster.name, cluster.nodes, cluster.network):
                # locald answers with the first key that it got from this agent or an earlier one.
                key = self._key or os.urandom(_KEY_BYTES)
                self._key = bytes.fromhex((await link.request("keep", key=key.hex()))["key"])
                await link.request("watch")
                on_failure.pop_all()
                return link
            if (await link.request("shutdown"))["shutdown"]:
                raise SiteUnavailable(
                    f"cluster {self.cluster.name}: a locald with earlier "
                    "settings is still ending; try again in some seconds"
                )
        raise SiteRejected(
            f"cluster {cluster.name} of {cluster.nodes} nodes at {cluster.network}: {cluster.directory} is held by "
            f"cluster {hello['cluster']} of {hello['nodes']} nodes at {hello['network']}",
            hint="end its jobs and agents first",
            fault=SiteFault.SITE,
        )


class StartFailures:
    """Decides at random which starts fail on purpose; agents of the same cluster draw the same sequence."""

    def __init__(self, directory: Path, cluster: str, probability: float) -> None:
        self._path = directory / START_FAILURES_FILE
        self._default = probability
        self._draws = random.Random(cluster)

    @property
    def probability(self) -> float:
        """The number in the file if there is one, else the configured probability."""
        try:
            return float(self._path.read_text())
        except (OSError, ValueError):
            return self._default

    def choose_command(self, argv: Sequence[str]) -> list[str]:
        """Return ``argv``, or a command that takes the job's nodes and fails at once."""
        return list(_FAILING_COMMAND if self._draws.random() < self.probability else argv)


class _Link:
    """A connection to locald, the daemon of the embedded cluster, with concurrent requests and notices of changes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, changed: asyncio.Event) -> None:
        """``changed`` is set at each notice, and when the connection ends."""
        self._reader = reader
        self._writer = writer
        self._changed = changed
        self._last_id = 0
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._task = asyncio.create_task(self._read_replies())

    @property
    def is_alive(self) -> bool:
        return not self._task.done()

    async def request(self, operation: str, **fields: object) -> dict[str, Any]:
        """Send a request and return the reply. Raise ``SiteError``."""
        if not self.is_alive:
            raise SiteUnavailable("locald has ended")
        self._last_id += 1
        id = self._last_id
        future = self._replies[id] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(json.dumps({"op": operation, "id": id, **fields}).encode() + b"\n")
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                reply: dict[str, Any] = await future
        except TimeoutError as error:
            raise SiteUnavailable(f"locald did not answer within {REQUEST_TIMEOUT_S:g} s") from error
        finally:
            self._replies.pop(id, None)
        if "error" in reply:
            raise_error(reply)
        return reply

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _read_replies(self) -> None:
        """Complete pending requests by replies of locald, and announce changes; fail all requests at the end."""
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "changed" in message:
                    self._changed.set()
                elif (future := self._replies.get(message.get("id"))) and not future.done():
                    future.set_result(message)
        except (OSError, ValueError):  # reset, or a line cut off
            pass
        finally:
            self._writer.close()
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(SiteUnavailable("locald has ended"))
            self._changed.set()


def _job_from_record(record: dict[str, Any]) -> LrmJob:
    """Convert a job's record from locald, the daemon of the embedded cluster."""
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
