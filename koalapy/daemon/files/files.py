"""Maintain the replica catalogue for users and submissions; agents report the state of each replica."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any

import structlog

from koalapy.daemon.agents.questions import Questions
from koalapy.daemon.engine.database import run_in_database
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.bounds import MAX_LISTED, Bytes, MaxEntries, Name, Path
from koalapy.model.errors import (
    ConflictError,
    KoalaError,
    NotFoundError,
    ProblemCode,
    SiteFault,
    SiteRejected,
    SiteUnavailable,
    UsageError,
    reject,
)
from koalapy.model.identity import Identity
from koalapy.model.job_spec import JobSpec
from koalapy.model.replica import Part, Replica, ReplicaState
from koalapy.model.request import Bundle, ClusterName, InputFile
from koalapy.model.wording import format_list, suggest_names
from koalapy.protocol.messages import Message
from koalapy.scheduler.events import Event, ReplicasChanged
from koalapy.store.service_tables import FileStore
from koalapy.system.event_loop import BackgroundTasks
from koalapy.validation.inputs import ADD, name_problem, near_names, resolve_inputs

log = structlog.get_logger()

READ_TIMEOUT = 6 * 3600.0
"""Seconds for an agent to read a whole file; the wait ends at once if the agent disconnects."""
MAX_NAME_LENGTH = 1000
"""Maximum length of a logical name in characters."""
FIRST = ("", "")
"""A key before those of all replicas in the order of name and cluster."""
STATES = {SiteFault.MISSING: ReplicaState.MISSING, SiteFault.CHANGED: ReplicaState.CHANGED}
"""The state of a replica by the fault that an agent reports; any other fault makes it unreadable."""


class FoundPart(Message):
    """One entry of a folder."""

    name: Path
    size: Bytes
    checksum: Name


class Found(Message):
    """A file or folder on a file site: the payload of an answer to ``stat``."""

    path: Path
    size: Bytes
    checksum: Name
    parts: Annotated[list[FoundPart], MaxEntries(MAX_LISTED)] | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """A replica after verification; ``problem`` is why it could not be verified, empty if it was."""

    replica: Replica
    problem: str = ""


class Files:
    """The replica catalogue, kept the same in the store, in memory and in the scheduler."""

    def __init__(self, engine: Engine, store: FileStore, questions: Questions, bundles: Bundles) -> None:
        self._engine = engine
        self._catalogue = engine.catalogue
        self._store = store
        self._questions = questions
        self._bundles = bundles
        self._changing = asyncio.Lock()
        """Held from reading the catalogue until the resulting change is stored."""
        self._background = BackgroundTasks()

    # Requests of users

    def list_replicas(
        self, name: str | None = None, start: tuple[str, ClusterName] = FIRST, limit: int | None = None
    ) -> Sequence[Replica]:
        """Return at most ``limit`` replicas in the order of name and cluster, those after the key ``start``.

        Raise ``NotFoundError`` if no replica has the name ``name``.
        """
        if name is None:
            return list(islice(self._catalogue.replicas_after(*start), limit))
        replicas = self._catalogue.replicas_of(name)
        if not replicas:
            hint = f"{near_names(name, self._catalogue.names())}; add it with {ADD}"
            raise NotFoundError(
                f"the replica catalogue has no {name}",
                field="name",
                value=name,
                hint=hint,
                code=ProblemCode.REPLICA_NOT_FOUND,
            )
        return [replica for replica in replicas if (name, replica.cluster) > start][:limit]

    async def add_replica(self, name: str, cluster: ClusterName, path: str) -> Replica:
        """Add a file or folder to the catalogue after the cluster's agent has read it.

        Raise ``ConflictError`` if its content differs from the good replicas of that name, ``UsageError`` if the agent
        cannot read the path, and ``SiteUnavailable`` if the agent cannot answer.
        """
        return await self._engine.database.await_outcome(self._add_replica(name, cluster, path))

    async def _add_replica(self, name: str, cluster: ClusterName, path: str) -> Replica:
        """Read a file on a cluster, and add it to the catalogue under a logical name.

        Raise ``ConflictError`` if a good replica elsewhere has another checksum.
        """
        describe_request(f"{name} on {cluster}")
        _check_name(name)
        self._engine.check_cluster(cluster, "cluster")
        if not path.startswith("/"):
            reject("path", path, f"is {path!r}, which is not absolute", f"give it from the root on {cluster}")
        try:
            replica = await self._read_replica(name, cluster, path)
        except SiteRejected as error:
            hint = error.hint or f"give a file or folder that the agent of {cluster} can read"
            raise UsageError(f"path: {error.message}", field="path", value=path, hint=hint) from error
        async with self._changing:
            good = [r for r in self._good_replicas(name) if r.cluster != cluster]
            if good and good[0].checksum != replica.checksum:
                clusters = format_list([r.cluster for r in good])
                raise ConflictError(
                    f"{cluster}:{path} is another file than the {name} on {clusters}: its SHA-256 begins with "
                    f"{replica.checksum[:8]}, not {good[0].checksum[:8]}",
                    field="path",
                    value=path,
                    hint=f"give it another name, or first say koala replicas remove {name}",
                    code=ProblemCode.REPLICA_DIFFERS,
                )
            await self._store_replicas([replica])
        return replica

    async def verify_replicas(self, name: str | None = None, cluster: ClusterName | None = None) -> Sequence[Verified]:
        """Verify replicas by their agents and store the results.

        Replicas on unreachable clusters are returned unchanged, with the problem.
        """
        return await self._engine.database.await_outcome(self._verify_selected(name, cluster))

    async def _verify_selected(self, name: str | None, cluster: ClusterName | None) -> Sequence[Verified]:
        """Verify the matching replicas, all clusters at once; return the results by name and cluster."""
        chosen = self._select_replicas(name, cluster)
        describe_request(f"{len(chosen)} replicas")
        clusters = {replica.cluster for replica in chosen}
        groups = await asyncio.gather(*(self._verify_all([r for r in chosen if r.cluster == c]) for c in clusters))
        verified = [result for group in groups for result in group]
        return sorted(verified, key=lambda result: (result.replica.name, result.replica.cluster))

    async def remove_replicas(self, name: str, cluster: ClusterName | None = None) -> Sequence[Replica]:
        """Remove replicas from the catalogue, but not their files; return the removed replicas."""
        return await self._engine.database.await_outcome(self._remove_selected(name, cluster))

    async def _remove_selected(self, name: str, cluster: ClusterName | None) -> Sequence[Replica]:
        """Remove the matching replicas from the catalogue; their files on the clusters stay."""
        describe_request(f"{name} on {cluster}" if cluster else name)
        async with self._changing:
            removed = self._select_replicas(name, cluster)
            clusters = [replica.cluster for replica in removed]
            await run_in_database(self._store.remove_replicas, name, clusters)
            for replica_cluster in clusters:
                self._catalogue.remove(name, replica_cluster)
            await self._notify_scheduler(name)
        return removed

    def _select_replicas(self, name: str | None, cluster: ClusterName | None) -> Sequence[Replica]:
        """Return the replicas of a name and of a cluster; None selects all.

        Raise ``NotFoundError`` if a name is given and no replica matches.
        """
        if cluster is not None:
            self._engine.check_cluster(cluster, "cluster")
        replicas = self.list_replicas(name)
        chosen = [replica for replica in replicas if cluster in (None, replica.cluster)]
        if name is not None and not chosen:
            hint = suggest_names(cluster or "", (replica.cluster for replica in replicas))
            raise NotFoundError(
                f"{cluster} has no replica of {name}",
                field="cluster",
                value=cluster,
                hint=hint,
                code=ProblemCode.REPLICA_NOT_FOUND,
            )
        return chosen

    # Reports of transfers

    def mark_spoiled(self, file: str, cluster: ClusterName, error: str) -> tuple[Event, ...]:
        """Mark a replica as unreadable after a transfer has found that it differs from the catalogue.

        Return the events for the scheduler. The replica is verified in the background.
        """
        replica = self._catalogue.get(file, cluster)
        if replica is None or replica.state is not ReplicaState.GOOD:
            return ()
        self._catalogue.put(replace(replica, state=ReplicaState.UNREADABLE, reason=error))
        log.warning("a replica is not good", action="replica-spoiled", file=file, cluster=cluster, error=error)
        self._run_in_background(self._store_spoiled(file, cluster))
        return (self._make_event(file),)

    async def _store_spoiled(self, file: str, cluster: ClusterName) -> None:
        """Store that a replica is bad, then verify it and store the exact state."""
        async with self._changing:
            if replica := self._catalogue.get(file, cluster):
                await self._store_replicas([replica])
        if replica is not None and (verified := (await self._verify_all([replica], spoiled=True))[0]).problem:
            log.info(
                "it cannot be looked at",
                action="replica-not-verified",
                file=file,
                cluster=cluster,
                error=verified.problem,
            )

    def _run_in_background(self, work: Any) -> None:
        """Run a coroutine that no request waits for; log its errors."""

        async def run_logged() -> None:
            try:
                await work
            except KoalaError as error:
                log.error("a replica's state was not kept", action="replica-not-noted", error=error.message)

        self._background.spawn(run_logged())

    # Verification by agents

    async def _verify_all(self, replicas: Sequence[Replica], *, spoiled: bool = False) -> Sequence[Verified]:
        """Verify replicas of one cluster one after the other. With ``spoiled``, a match does not mark one as good."""
        results = []
        for replica in replicas:
            try:
                now, problem = await self._read_state(replica), ""
            except SiteUnavailable as error:
                now, problem = replica, error.message
            async with self._changing:
                now = self._compare_with_copies(now)
                current = self._catalogue.get(replica.name, replica.cluster)
                if current is not None and (current.path, current.added_at) != (replica.path, replica.added_at):
                    now = current  # The replica was added again during the verification; that result is newer.
                elif current is not None and not problem and not (spoiled and now.state is ReplicaState.GOOD):
                    await self._store_replicas([now])
            results.append(Verified(now, problem))
        return results

    def _compare_with_copies(self, replica: Replica) -> Replica:
        """Return a replica, marked as changed if it would be good but differs from good replicas of that name."""
        copies = [r for r in self._good_replicas(replica.name) if r.cluster != replica.cluster]
        if replica.state is not ReplicaState.GOOD or not copies or copies[0].checksum == replica.checksum:
            return replica
        reason = (
            f"its SHA-256 begins with {replica.checksum[:8]}, not {copies[0].checksum[:8]} as on {copies[0].cluster}"
        )
        return replace(replica, state=ReplicaState.CHANGED, reason=reason)

    async def _read_state(self, replica: Replica) -> Replica:
        """Return a replica with the state that its cluster's agent reports now.

        Raise ``SiteUnavailable`` if the agent cannot answer.
        """
        now = self._engine.clock()
        try:
            current = await self._read_replica(replica.name, replica.cluster, replica.path)
        except SiteRejected as error:
            state = STATES.get(error.fault, ReplicaState.UNREADABLE)
            return replace(replica, state=state, reason=error.message, verified_at=now)
        if current.checksum == replica.checksum:
            return replace(
                replica, state=ReplicaState.GOOD, reason="", verified_at=current.verified_at, parts=current.parts
            )
        reason = f"its SHA-256 begins with {current.checksum[:8]}, not {replica.checksum[:8]}"
        if current.size != replica.size:
            reason = f"it has {current.size} bytes, not {replica.size}"
        return replace(replica, state=ReplicaState.CHANGED, reason=reason, verified_at=now)

    async def _read_replica(self, name: str, cluster: ClusterName, path: str) -> Replica:
        """Return a replica of the file or folder that a cluster's agent reads at a path.

        Raise ``SiteRejected`` if the agent cannot read it, and ``SiteUnavailable`` if the agent cannot answer.
        """
        payload: dict[str, object] = {"path": path, "checksum": True}
        try:
            answer = await self._questions.ask_agent(cluster, "stat", payload, READ_TIMEOUT)
        except SiteRejected as error:
            if error.fault is SiteFault.UNAVAILABLE:
                raise SiteUnavailable(error.message, hint="try again") from error
            raise
        try:
            report = Found.model_validate(answer)
        except ValueError as error:
            raise SiteUnavailable(
                f"the agent of {cluster} sent an invalid description of {path}", hint="update its agent"
            ) from error
        parts = None if report.parts is None else tuple(Part(p.name, p.size, p.checksum) for p in report.parts)
        now = self._engine.clock()
        resolved_path = report.path or path
        return Replica(name, cluster, resolved_path, report.size, report.checksum, parts, added_at=now, verified_at=now)

    def _good_replicas(self, name: str) -> Sequence[Replica]:
        return [replica for replica in self._catalogue.replicas_of(name) if replica.state is ReplicaState.GOOD]

    async def _store_replicas(self, replicas: Sequence[Replica]) -> None:
        """Write replicas to the store and to memory, then notify the scheduler."""
        await run_in_database(self._store.save_replicas, replicas)
        for replica in replicas:
            self._catalogue.put(replica)
        await self._notify_scheduler(*sorted({replica.name for replica in replicas}))

    async def _notify_scheduler(self, *names: str) -> None:
        """Notify the scheduler of stored changes; the notification happens even if the caller cannot wait for it."""
        await self._engine.commit(WorkItem(events=tuple(self._make_event(name) for name in names), decided=True))

    def _make_event(self, name: str) -> ReplicasChanged:
        return ReplicasChanged(name, self._catalogue.good_sites(name))

    # Submissions

    async def resolve_spec(self, spec: JobSpec, caller: Identity) -> JobSpec:
        """Return a submission with its inputs and bundle resolved from the catalogue.

        Raise ``UsageError`` if an input or the bundle is unknown, or both contain a file of the same name.
        """
        if spec.bundle is None:
            return self._resolve_inputs(spec)
        try:
            bundle = self._bundles.touch_visible(caller, spec.bundle.id)
        except NotFoundError as error:
            raise UsageError(f"bundle: {error.message}", field="bundle", value=error.value, hint=error.hint) from error
        tops = await self._bundles.top_names(bundle.id)
        spec = self._resolve_inputs(spec)
        names = {file.file_name for file in spec.all_inputs} | {result.file_name for result in spec.result_inputs}
        if clashes := names & tops:
            name = min(clashes)
            raise UsageError(
                f"the bundle contains {name}, which is also the name of an input",
                field="bundle",
                value=bundle.id,
                hint="give the input another name with as, or rename the staged file",
            )
        return replace(spec, bundle=Bundle(bundle.id, bundle.size, bundle.files))

    def _resolve_inputs(self, spec: JobSpec) -> JobSpec:
        return resolve_inputs(spec, self._catalogue)


def _check_name(name: str) -> None:
    """Raise ``UsageError`` unless a logical name is a text of one line with a valid file name as its last part."""
    problem = "longer than 1000 characters" if len(name) > MAX_NAME_LENGTH else ""
    if not problem and name.strip() != name:
        problem = "with blanks around it"
    problem = problem or name_problem(InputFile(name).file_name)
    if not problem and not name.isprintable():
        problem = "with characters that cannot be shown"
    if problem:
        hint = "give a name as climate/2026.nc: its last part is the file's name for programs"
        raise UsageError(f"name is {name[:100]!r}, {problem}", field="name", value=name, hint=hint)
