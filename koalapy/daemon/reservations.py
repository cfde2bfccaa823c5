"""Advance reservations: nodes of several clusters for a time, on all of them or on none (ADR 38)."""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import structlog
from pydantic import TypeAdapter, ValidationError

from koalapy.daemon.agents.questions import Questions
from koalapy.daemon.agents.session import Session, Sessions
from koalapy.daemon.engine.database import run_in_database
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.cluster import ClusterState
from koalapy.model.errors import ConflictError, ForbiddenError, NotFoundError, SiteError, reject
from koalapy.model.field import Length, find_out_of_bounds
from koalapy.model.identity import Identity, Permission, Role
from koalapy.model.job_sizes import count_peak
from koalapy.model.job_spec import Duration, JobSpec, PointInTime
from koalapy.model.placement import Refusal
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, Name, Request, has_settings
from koalapy.model.reservation import MAX_LATE_S, MAX_SPAN_S, Reservation, ReservationState, ReservedPart
from koalapy.model.wording import format_duration, format_list, format_nodes, format_utc
from koalapy.scheduler.events import ReservationChanged
from koalapy.store.service_tables import ReservationStore
from koalapy.validation.submission import check_submission

log = structlog.get_logger()

CHECK_INTERVAL = 15.0
"""Seconds between two comparisons of the reservations with those of the clusters."""
RESERVE_TIMEOUT_S = 60.0
"""Seconds in which a cluster must answer whether it reserves nodes."""
START_S = 60.0
"""Seconds in which a job must be able to start, or a tenth of a short reservation."""
KEPT_S = 90 * 86400.0
"""Seconds for which ended reservations are listed."""
FAILED_KEPT_S = 3600.0
"""Seconds for which those that clusters have refused are stored."""
MAX_LIVE = 100
"""Reservations that a user may have at a time."""
MAX_RELEASED = 1000
"""Reservations that one check has a cluster release; the next one goes on."""
RELEASE_TIMEOUT_S = 30.0
"""Seconds for all questions to a cluster about reservations that it should not have."""
MAX_SITE_NUMBER = 10**9
"""Site names end with a random number below."""
NAME = re.compile(r"(?!r[0-9]+$|koala-)[a-z0-9_][a-z0-9_.-]{0,39}", re.ASCII | re.IGNORECASE)
"""Names that users may give, other than those of the daemon and of resource managers."""
LIST_HINT = "koala reserve list shows yours"
_NAMES = TypeAdapter(list[str])


@dataclass(frozen=True, slots=True)
class ReservationOrder:
    """What a user wants to reserve; ``begin`` in seconds since the epoch, ``duration`` in seconds."""

    request: Request
    """Only sizes and clusters; the settings of jobs are theirs."""
    begin: PointInTime
    duration: Duration
    name: Name = ""
    """By default ``r`` and a number."""
    users: Annotated[tuple[Name, ...], Length(50)] = ()
    """Other users that may use it."""


class Reservations:
    """Makes, ends and checks reservations.

    It stores each step before it asks clusters or tells the scheduler; that one has failed is stored by ``check``.
    """

    def __init__(
        self,
        engine: Engine,
        store: ReservationStore,
        questions: Questions,
        sessions: Sessions,
        instance: str,
        may_reserve: Permission,
    ) -> None:
        """``instance``: identifies the database, so that no other daemon's reservations have the same names."""
        self._engine, self._queries, self._store = engine, engine.queries, store
        self._questions, self._sessions, self._may_reserve = questions, sessions, may_reserve
        self._prefix = f"koala-{instance:0<12.12}-"
        self._all = {reservation.id: reservation for reservation in store.load()}
        self._last_id = max(self._all, default=0)
        self._unstored: dict[int, Reservation] = {}
        """Changes that the database or the scheduler may not have; ``check`` makes them."""
        for reservation in [r for r in self._all.values() if r.state is ReservationState.MAKING]:
            self._fail(reservation, "the daemon ended while it was made")
        self._checked: dict[ClusterName, Session] = {}
        """The sessions in which a cluster had no reservation that it should not have."""
        self._making: dict[asyncio.Task[Reservation], tuple[str, str]] = {}
        """The names and owners of those being made, also between two tries."""
        self._lock = asyncio.Lock()
        """Held during a change."""

    # What users see

    def list_visible(self, caller: Identity) -> list[Reservation]:
        """Return the reservations that the caller may use, all for operators, the latest first."""
        may_see_all = caller.has_role(Role.OPERATOR)
        return [reservation for reservation in self._list_accepted() if may_see_all or reservation.may_use(caller.user)]

    def _list_accepted(self) -> list[Reservation]:
        """Return the reservations without those that clusters have refused, the latest first."""
        return [
            entry for _, entry in sorted(self._all.items(), reverse=True) if entry.state is not ReservationState.FAILED
        ]

    def find(self, name: str, caller: Identity) -> Reservation:
        """Return a reservation. Raise ``NotFoundError`` if the caller may not see one of that name."""
        for reservation in self.list_visible(caller):  # a live one is the latest of its name
            if reservation.name == name:
                return reservation
        raise NotFoundError(f"there is no reservation {name}", field="reservation", value=name, hint=LIST_HINT)

    def resolve_spec(self, spec: JobSpec) -> JobSpec:
        """Return a submission with the times of its reservation as bounds of its begin and end.

        Raise ``UsageError`` if its owner may not use the reservation, or if the job does not fit into it.
        """
        name, now = spec.reservation, self._engine.clock()
        if not name:
            return spec
        usable = [entry for entry in self._list_accepted() if entry.name == name and entry.may_use(spec.owner)]
        if not usable:
            reject("reservation", name, f"is {name}, and {spec.owner} has no such reservation", LIST_HINT)
        reservation = usable[0]
        if reservation.state is not ReservationState.MADE or now >= reservation.ends_at:
            reason = reservation.reason or reservation.state
            reject("reservation", name, f"is {name}, which is not in force: {reason}", "make another: koala reserve")
        if spec.request.total_size > reservation.nodes:
            problem = f"asks for {format_nodes(spec.request.total_size)}, more than reservation {name} has"
            reject("request", spec.request.total_size, problem, f"ask for at most {format_nodes(reservation.nodes)}")
        if isinstance(spec.request, FixedRequest):
            for component in spec.request.components:
                if not reservation.nodes_on(component.cluster or ""):
                    problem = f"names {component.cluster}, where reservation {name} has no nodes"
                    reject("request", component.cluster, problem, f"it has {format_parts(reservation.parts)}")
        begin = max(reservation.begins_at, spec.begin or 0.0)
        remaining_s = reservation.ends_at - max(now, begin)
        longest = max(1.0, remaining_s - min(START_S, remaining_s / 10))
        if (spec.walltime or 0.0) > longest:
            problem = f"is {format_duration(spec.walltime or 0.0)}, too long to start and end within reservation {name}"
            reject("walltime", spec.walltime, problem, f"give at most {format_duration(longest)}")
        deadline = min(reservation.ends_at, spec.deadline or reservation.ends_at)
        return spec.with_fields(begin=begin if begin > now else spec.begin, deadline=deadline)

    # Make

    async def make(self, order: ReservationOrder, caller: Identity) -> Reservation:
        """Reserve nodes on all clusters of an order, or on none. It is completed even if the caller disconnects.

        A cluster that refuses its part of a request without fixed clusters is left out of the next try. Raise
        ``UsageError`` for an order that can never be met, and ``ConflictError`` if clusters refuse.
        """
        order = self._check_order(order, caller)
        task = asyncio.create_task(self._make(order, caller))
        self._making[task] = order.name, caller.user
        task.add_done_callback(self._making.pop)
        return await self._engine.database.await_outcome(asyncio.shield(task))

    def _check_order(self, order: ReservationOrder, caller: Identity) -> ReservationOrder:
        """Return a valid order that begins now or later. Raise ``UsageError`` or ``ForbiddenError``."""
        now, request = self._engine.clock(), order.request
        for field, value, problem, remedy in find_out_of_bounds(order):
            reject(field, value, problem, remedy)
        if not self._may_reserve.is_allowed_to(caller):
            hint = "ask an operator: they may, and the setting reservations allows it to others"
            raise ForbiddenError(f"{caller.user} may not reserve nodes here", hint=hint)
        if order.begin < now - MAX_LATE_S:
            past = f"is {format_utc(order.begin, now, exact=True)}, which has passed"
            reject("begin", order.begin, past, "give a time in the future, or now")
        begin = max(order.begin, now)
        if begin + order.duration > now + MAX_SPAN_S:
            hint = "give an earlier begin, or a shorter duration"
            reject("duration", order.duration, "ends more than a year from now", hint)
        if order.name:
            if not NAME.fullmatch(order.name):
                hint = "give letters, digits, _, - and ., at most 40, other than r with a number or koala- first"
                reject("name", order.name, f"is {order.name[:60]!r}, which cannot be one", hint)
            if self._is_used(order.name):
                reject(
                    "name",
                    order.name,
                    f"is {order.name}, which another reservation has, or jobs of an ended one",
                    "choose another",
                )
        count = sum(entry.owner == caller.user and entry.state is ReservationState.MADE for entry in self._live())
        if count + sum(owner == caller.user for _, owner in self._making.values()) >= MAX_LIVE:
            hint = "cancel one, or wait for the end of one"
            raise ConflictError(f"{caller.user} has {MAX_LIVE} reservations, the most at a time", hint=hint)
        if not isinstance(request, FlexibleRequest):
            if any(map(has_settings, request.components)):
                hint = "give them with the jobs that use the reservation"
                reject("request.components", len(request.components), "have settings other than size and cluster", hint)
            for name in sorted({c.cluster or "" for c in request.components}):
                drain = self._queries.grid[name].drained if name in self._queries.grid else None
                if drain is not None and drain.until > begin:
                    later = "" if drain.ends_at is None else f", begin after its end at {format_utc(drain.until, now)}"
                    hint = f"leave it out{later}, or resume it: koala clusters resume {name}"
                    reject("request", name, f"names {name}, which is drained: {drain.reason or 'by an operator'}", hint)
        check_submission(self._spec_of(request, caller), self._queries.limits())
        return replace(order, begin=begin)

    def _is_used(self, name: str) -> bool:
        """Return whether a reservation has a name or is to get it, or an unfinished job names an ended one."""
        names = {reservation.name for reservation in self._live()} | {name for name, _ in self._making.values()}
        return name in names or any(job.spec.reservation == name for job in self._queries.jobs())

    def _spec_of(self, request: Request, caller: Identity) -> JobSpec:
        """Return a job that would need the nodes."""
        return JobSpec(request, ("reservation",), owner=caller.user)

    async def _make(self, order: ReservationOrder, caller: Identity) -> Reservation:
        refusals: dict[ClusterName, str] = {}
        while True:
            parts = self._divide(order, caller, refusals)
            self._last_id += 1
            ident, ends_at = self._last_id, order.begin + order.duration
            reservation = Reservation(
                ident,
                order.name or f"r{ident}",
                self._new_site_name(),
                caller.user,
                order.begin,
                ends_at,
                parts,
                self._engine.clock(),
                order.users,
            )
            describe_request(f"reservation {reservation.name}", format_parts(parts))
            self._all[ident] = reservation  # at once, since its nodes are not free for other orders
            try:
                await run_in_database(self._store.save, reservation)
                answers = await asyncio.gather(*(self._ask_to_reserve(reservation, part) for part in parts))
                refused = {part.cluster: refusal for part, refusal in zip(parts, answers, strict=True) if refusal}
                if not refused:
                    return await self._change(reservation, ReservationState.MADE, "")
            except BaseException:
                self._fail(reservation, "the daemon failed")
                await self._release(reservation)
                raise
            refusals |= refused
            reason = "; ".join(f"{name}: {refusal}" for name, refusal in refused.items())
            self._fail(reservation, reason)  # a commit here would take the audit entry of the request
            await self._release(reservation)
            if isinstance(order.request, FixedRequest):
                raise _refused(refusals)

    def _new_site_name(self) -> str:
        """Return a name that no cluster has, also not since before a restore of the database."""
        used = {reservation.site_name for reservation in self._all.values()}
        while (name := f"{self._prefix}{secrets.randbelow(MAX_SITE_NUMBER)}") in used:
            pass
        return name

    def _divide(
        self, order: ReservationOrder, caller: Identity, refusals: Mapping[ClusterName, str]
    ) -> tuple[ReservedPart, ...]:
        """Return the clusters and numbers of nodes, as the default policy places a job of this request.

        Raise ``UsageError`` if too few nodes are free then, and ``ConflictError`` if that is so without the clusters
        that have refused.
        """
        begins_at, ends_at = order.begin, order.begin + order.duration
        view = self._queries.grid.view()
        clusters = [
            cluster.emptied().with_idle(self._count_free(cluster.name, begins_at, ends_at))
            for cluster in view
            if (cluster.state is ClusterState.USABLE or self._queries.grid[cluster.name].usable_from <= begins_at)
            and cluster.name not in refusals
        ]
        view = view.select_clusters(frozenset(cluster.name for cluster in clusters)).with_clusters(clusters)
        answer = self._queries.questions.divide(self._spec_of(order.request, caller), view)
        if isinstance(answer, Refusal):
            if refusals:
                raise _refused(refusals)
            free = format_list([f"{cluster.name} has {cluster.idle}" for cluster in clusters]) or "no cluster is usable"
            problem = f"cannot be reserved: {answer.summary}; without reserved and drained nodes, {free}"
            size = order.request.total_size
            reject("request", size, problem, "ask for fewer nodes, or for another time")
        sizes = Counter[ClusterName]()
        for component in answer.components:
            sizes[component.cluster] += component.size
        return tuple(ReservedPart(name, size) for name, size in sorted(sizes.items()))

    def _count_free(self, cluster: ClusterName, begins_at: float, ends_at: float) -> int:
        """Return the nodes of a cluster that are neither down nor reserved nor drained within a time."""
        status = self._queries.grid[cluster]
        report = status.last_report
        uses = [(entry.begins_at, entry.ends_at, entry.nodes_on(cluster)) for entry in self._live()]
        for reservation in report.reservations:  # which may still list released ones of this daemon
            if not reservation.name.startswith(self._prefix):
                uses.append((reservation.begins, reservation.ends, reservation.nodes))
        uses += [(drain.begins, drain.ends, report.total) for drain in status.nodes.drain_reservations]
        reserved = count_peak(use for use in uses if use[0] < ends_at and begins_at < use[1])
        return max(0, report.total - report.down - reserved)

    async def _ask_to_reserve(self, reservation: Reservation, part: ReservedPart) -> str:
        """Ask a cluster to reserve its part; return why it does not, empty if it does."""
        session, accounts = self._sessions.get(part.cluster), self._queries.accounts
        if session is not None and not session.hello.reserves:
            return "its agent is too old to reserve nodes; update it"
        users = [user for user in (reservation.owner, *reservation.users) if user]
        allowed = [user for user in users if not accounts.rejection_reason(user, part.cluster)]
        question = {
            "name": reservation.site_name,
            "nodes": part.nodes,
            "begins": reservation.begins_at,
            "ends": reservation.ends_at,
            "accounts": sorted({accounts.local_user(user, part.cluster) for user in allowed}),
        }
        try:
            await self._questions.ask_agent(part.cluster, "reserve", question, RESERVE_TIMEOUT_S)
        except SiteError as error:
            return error.message
        return ""

    # End

    async def cancel(self, name: str, caller: Identity) -> Reservation:
        """End a reservation. Raise ``ConflictError`` if it is not in force, or if jobs run in it."""
        reservation = self.find(name, caller)
        if not (caller.has_role(Role.OPERATOR) or caller.owns(reservation.owner)):
            hint = "ask its owner or an operator"
            raise ForbiddenError(f"reservation {name} is not yours", field="reservation", value=name, hint=hint)
        if reservation.state is not ReservationState.MADE:
            raise ConflictError(f"reservation {name} is {reservation.state}", field="reservation", value=name)
        if jobs := sorted(job.id for job in self._queries.active_jobs() if job.spec.reservation == name):
            listed = format_list([str(job) for job in jobs])
            hint = f"wait for their ends, or cancel them: koala cancel {jobs[0]}"
            raise ConflictError(
                f"reservation {name} is in use by jobs {listed}", field="reservation", value=name, hint=hint
            )
        change = self._change(reservation, ReservationState.CANCELLED, f"was cancelled by {caller.user}")
        reservation = await self._engine.database.await_outcome(change)
        await self._release(reservation)
        return reservation

    def _live(self) -> list[Reservation]:
        return [reservation for reservation in self._all.values() if reservation.state.is_live]

    async def _change(self, reservation: Reservation, state: ReservationState, reason: str) -> Reservation:
        """Change the state of a reservation. If it was changed by others in between, return its present value instead.

        It has its former state until the change is stored and the scheduler has it. If that fails, it can be repeated,
        and ``check`` does.
        """
        async with self._lock:
            if self._all[reservation.id] is not reservation:
                return self._all[reservation.id]
            now = self._engine.clock()
            self._unstored[reservation.id] = replace(reservation, state=state, reason=reason, changed_at=now)
            await self._store_change(reservation.id)
        return self._all[reservation.id]

    async def _store_change(self, ident: int) -> None:
        """Store a change with its effects on jobs, and request a check of the clusters of an ended reservation."""
        changed = self._unstored[ident]
        await self._engine.commit(WorkItem(events=(ReservationChanged(changed),)))
        self._all[ident] = changed
        del self._unstored[ident]
        if not changed.state.is_live:
            for part in changed.parts:
                self._checked.pop(part.cluster, None)
        log.info("a reservation has changed", action="reservation-changed", name=changed.name, state=str(changed.state))

    def _fail(self, reservation: Reservation, reason: str) -> None:
        """Take a reservation that is being made for failed; ``check`` stores that."""
        now = self._engine.clock()
        failed = replace(reservation, state=ReservationState.FAILED, reason=reason, changed_at=now)
        self._all[reservation.id] = self._unstored[reservation.id] = failed

    async def _release(self, reservation: Reservation) -> None:
        """Tell all clusters of a reservation to release the nodes. ``check`` repeats that where it failed."""
        await asyncio.gather(*(self._release_on(part.cluster, [reservation.site_name]) for part in reservation.parts))

    async def _release_on(self, cluster: ClusterName, names: Sequence[str]) -> None:
        """Tell a cluster to release reservations, each even if it does not release another."""
        errors = []
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                for name in names[:MAX_RELEASED]:
                    try:
                        await self._questions.ask_agent(cluster, "unreserve", {"name": name})
                    except SiteError as error:
                        errors.append(f"{name}: {error.message}")
        except TimeoutError:
            errors.append(f"not all were released within {RELEASE_TIMEOUT_S:g} s")
        if errors or len(names) > MAX_RELEASED:
            self._checked.pop(cluster, None)
        if errors:
            text = "reservations are not released yet"
            log.warning(text, action="reservation-changed", cluster=cluster, number=len(errors), error=errors[0])

    # Compare with the clusters

    async def check(self) -> None:
        """End reservations that are over or that a cluster has lost, and remove what clusters should not have."""
        now = self._engine.clock()
        for ident in [*self._unstored]:
            async with self._lock:
                if ident in self._unstored:
                    await self._store_change(ident)
        for reservation in self._live():
            if reservation.state is ReservationState.MADE and now >= reservation.ends_at:
                await self._change(reservation, ReservationState.OVER, "is over")
                await self._release(reservation)
        kept_s = {ReservationState.FAILED: FAILED_KEPT_S}
        ended = (reservation for reservation in self._all.values() if not reservation.state.is_live)
        old = [entry.id for entry in ended if entry.changed_at < now - kept_s.get(entry.state, KEPT_S)]
        if outdated := [ident for ident in old if ident != self._last_id]:
            await run_in_database(self._store.remove, outdated)
            self._all = {ident: reservation for ident, reservation in self._all.items() if ident not in outdated}
        await asyncio.gather(*(self._check_cluster(cluster.name) for cluster in self._queries.grid.clusters()))

    async def _check_cluster(self, cluster: ClusterName) -> None:
        """Compare the reservations of a cluster: in each new session, and while it should have one."""
        session = self._sessions.get(cluster)
        expected = [entry for entry in self._live() if entry.state is ReservationState.MADE and entry.nodes_on(cluster)]
        is_checked = session is self._checked.get(cluster) and not expected
        if session is None or is_checked or not (session.ready and session.hello.reserves):
            return
        try:
            names = await self._list_names(cluster)
        except (SiteError, ValidationError) as error:
            log.warning("reservations are unknown", action="reservation-changed", cluster=cluster, error=str(error))
            return
        self._checked[cluster] = session
        await self._release_on(cluster, sorted(names - {reservation.site_name for reservation in self._live()}))
        for reservation in expected:
            is_over = self._engine.clock() >= reservation.ends_at
            if reservation.site_name not in names and self._all[reservation.id] is reservation and not is_over:
                lost = await self._change(reservation, ReservationState.BROKEN, f"was removed on {cluster}")
                await self._release(lost)

    async def _list_names(self, cluster: ClusterName) -> set[str]:
        """Return the names of this daemon's reservations that a cluster has."""
        answer = await self._questions.ask_agent(cluster, "reservations", {"prefix": self._prefix})
        pattern = re.compile(re.escape(self._prefix) + "[0-9]{1,9}", re.ASCII)
        return {name for name in _NAMES.validate_python(answer.get("names")) if pattern.fullmatch(name)}


def format_parts(parts: Iterable[ReservedPart]) -> str:
    return ", ".join(f"{part.cluster}:{part.nodes}" for part in parts)


def _refused(refusals: Mapping[ClusterName, str]) -> ConflictError:
    """Return the error of a reservation that clusters have refused, with their words."""
    texts = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    hint = "name other clusters, fewer nodes or another time"
    return ConflictError(f"no nodes were reserved: {texts}", field="request", hint=hint)
