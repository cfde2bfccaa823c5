"""The stores in memory, for trials and tests: what they hold is gone with the process."""

import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice

from koalapy.model.advice import Advised, Run, run_of
from koalapy.model.application import application_of
from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead, ChainChecker, chain_hash
from koalapy.model.errors import ConflictError, LeaseLost
from koalapy.model.history import DayFilter, Days, EndedJob, Figures, Key, Kind, day_of, ended_job, owners, tally
from koalapy.model.job import Attempt, Job, JobId, JobState, Priority, TimelineEntry
from koalapy.model.limits import NodeUse
from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.model.notification import Notification
from koalapy.model.prediction import Prediction
from koalapy.model.replica import Replica
from koalapy.model.request import ClusterName
from koalapy.ports import (
    Batch,
    ClusterRecord,
    JobFilter,
    JobPage,
    OutboxEntry,
    Saved,
    StoredBundle,
    StoredResult,
    StoredToken,
    Submitted,
    Usage,
)
from koalapy.store.advice import MAX_RETAINED_RUNS
from koalapy.store.measurements import MAX_RETAINED
from koalapy.store.memory_usage import mean_times


@dataclass(slots=True)
class Memory:
    """What outlives a store, as a database does: stores are opened on it one after the other."""

    instance: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    epoch: int = 0
    held: bool = False
    last_batch: int = 0
    last_job: JobId = 0
    max_runs: int = MAX_RETAINED_RUNS
    max_measurements: int = MAX_RETAINED
    jobs: dict[JobId, Job] = field(default_factory=dict)
    attempts: dict[JobId, dict[int, Attempt]] = field(default_factory=lambda: defaultdict(dict))
    timeline: dict[JobId, list[TimelineEntry]] = field(default_factory=lambda: defaultdict(list))
    outbox: dict[int, OutboxEntry] = field(default_factory=dict)
    submitted: dict[str, Submitted] = field(default_factory=dict)
    clusters: dict[ClusterName, ClusterRecord] = field(default_factory=dict)
    scans: dict[Priority, int] = field(default_factory=dict)
    advised: dict[tuple[JobId, int], Advised] = field(default_factory=dict)
    predictions: dict[tuple[JobId, str, float], Prediction] = field(default_factory=dict)
    runs: dict[JobId, Run] = field(default_factory=dict)
    """Of jobs that are not kept any more."""
    replicas: dict[tuple[str, ClusterName], Replica] = field(default_factory=dict)
    bundles: dict[str, StoredBundle] = field(default_factory=dict)
    results: dict[tuple[JobId, int, int], StoredResult] = field(default_factory=dict)
    tokens: dict[int, StoredToken] = field(default_factory=dict)
    audit: list[AuditEntry] = field(default_factory=list)
    notifications: dict[int, Notification] = field(default_factory=dict)
    audit_heads: list[AuditHead] = field(default_factory=list)
    """The hash of each entry that there has been."""
    audited: int = 0
    """Entries of the audit that there have been."""
    measurements: list[Measurement] = field(default_factory=list)
    days: Days = field(default_factory=Days)
    nodes: dict[tuple[int, ClusterName], int] = field(default_factory=dict)
    """Of clusters, the most in each day."""
    lock: threading.RLock = field(default_factory=threading.RLock)


class MemoryStore:
    """All stores' ports at once; holds the lease from its beginning. ``LeaseLost`` when another has taken over."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._numbers = count(1)
        with memory.lock:
            if memory.held:
                raise ConflictError("another daemon holds this memory", hint="end it first")
            memory.held, memory.last_batch = True, 0
            memory.epoch += 1
            self._epoch = memory.epoch

    @property
    def instance(self) -> str:
        return self._memory.instance

    @property
    def epoch(self) -> int:
        return self._epoch

    def close(self) -> None:
        """There is nothing to be closed."""

    def renew_lease(self, now: float) -> None:
        with self._writing():
            pass

    def raise_epoch(self, epoch: int) -> None:
        with self._writing() as memory:
            self._epoch = memory.epoch = epoch

    def release_lease(self) -> None:
        with self._memory.lock:
            if self._memory.epoch == self._epoch:
                self._memory.held = False

    @contextmanager
    def _writing(self) -> Iterator[Memory]:
        with self._memory.lock:
            if self._memory.epoch != self._epoch:
                raise LeaseLost(f"epoch {self._memory.epoch} has taken over from {self._epoch}")
            yield self._memory

    @contextmanager
    def _reading(self) -> Iterator[Memory]:
        with self._memory.lock:
            yield self._memory

    # Jobs

    def write(self, batch: Batch) -> None:
        batch.number = batch.number or next(self._numbers)
        with self._writing() as memory:
            if batch.number <= memory.last_batch:
                return
            ids = [entry.id for entry in batch.outbox]
            if len({*ids}) < len(ids) or not memory.outbox.keys().isdisjoint(ids):
                raise ValueError("a command of that id is in the outbox already")
            memory.last_batch = batch.number
            self._write(memory, batch)

    def _write(self, memory: Memory, batch: Batch) -> None:
        """Nothing of this fails, so that a batch is written as a whole."""
        current = [(job.id, job.attempt) for job in batch.jobs.values() if job.attempt is not None]
        for ident, attempt in (*current, *batch.attempts):
            memory.attempts[ident][attempt.generation] = attempt
        memory.advised |= {(given.job, given.generation): given for given in batch.advised}
        for job in batch.jobs.values():
            memory.jobs[job.id] = job = replace(job, attempt=memory.attempts[job.id].get(job.generation))
            given = memory.advised.get((job.id, job.generation))
            if given and job.state is JobState.SUCCEEDED and (run := run_of(job)):
                memory.advised[job.id, job.generation] = replace(given, actual=run.seconds)
        for line in batch.timeline:
            memory.timeline[line.job].append(line)
        memory.outbox |= {entry.id: entry for entry in batch.outbox}
        for done in batch.acknowledged:
            memory.outbox.pop(done, None)
        for used in batch.submitted:
            memory.submitted.setdefault(used.key, used)
        memory.clusters |= {record.name: record for record in batch.clusters}
        memory.scans |= batch.scans
        over = [memory.jobs[job.id] for job in batch.jobs.values() if job.state.is_final]
        for key, figures in tally(over, owners(batch.attempts, batch.jobs)).items():
            memory.days[key].add(figures)
        for record in batch.clusters:
            day = day_of(batch.at), record.name
            if record.total > memory.nodes.get(day, 0):
                memory.nodes[day] = record.total
        _append(memory, batch.audit)
        memory.notifications |= {each.id: each for each in batch.notifications}

    def load(self) -> Saved:
        with self._reading() as memory:
            return Saved(
                tuple(job for job in memory.jobs.values() if not job.state.is_final),
                tuple(entry for _, entry in sorted(memory.outbox.items())),
                tuple(map(_unreported, memory.clusters.values())),
                max(memory.last_job, *memory.jobs, 0) + 1,
                dict(memory.scans),
            )

    def submitted(self, keys: Collection[str]) -> dict[str, Submitted]:
        with self._reading() as memory:
            return {key: memory.submitted[key] for key in keys if key in memory.submitted}

    def job(self, job: JobId) -> Job | None:
        with self._reading() as memory:
            return memory.jobs.get(job)

    def page(self, which: JobFilter) -> JobPage:
        with self._reading() as memory:
            matching = (job for _, job in sorted(memory.jobs.items(), reverse=True) if _matches(job, which))
            found = list(islice(matching, which.limit + 1))
        jobs = found[: which.limit]
        return JobPage(jobs, jobs[-1].id if len(found) > len(jobs) else None)

    def timeline(self, job: JobId, after: int = 0, limit: int | None = None) -> list[TimelineEntry]:
        with self._reading() as memory:
            return list(islice(memory.timeline.get(job, ()), after, None if limit is None else after + limit))

    def attempts(self, job: JobId, last: int | None = None) -> list[Attempt]:
        with self._reading() as memory:
            attempts = [attempt for _, attempt in sorted(memory.attempts.get(job, {}).items())]
            return attempts if last is None else attempts[max(0, len(attempts) - last) :]

    def usage(self, start: float, end: float) -> Usage:
        with self._reading() as memory:
            users = [job for job in memory.jobs.values() if not job.spec.internal]
            nodes: dict[ClusterName, float] = defaultdict(float)
            for job in users:
                for attempt in memory.attempts[job.id].values():
                    active = job.state.is_active and attempt.generation == job.generation
                    for part in attempt.components:
                        until = end if part.ended_at is None and active else part.ended_at
                        if part.claimed_at is None or until is None or part.claimed_at > until:
                            continue
                        if part.claimed_at < end and until > start:
                            held = min(until, end) - max(part.claimed_at, start)
                            nodes[part.cluster] += part.size * held
        over = [job for job in users if job.state.is_final and job.ended_at is not None and start < job.ended_at <= end]
        return Usage(
            dict(nodes),
            {priority: mean_times([job for job in over if job.spec.priority is priority]) for priority in Priority},
            dict(Counter(job.state for job in over)),
            sum(job.restarts for job in over),
        )

    # The advisor's

    def record(self, application: str, limit: int, owner: str | None = None) -> list[Advised]:
        with self._reading() as memory:
            newest = (given for _, given in sorted(memory.advised.items(), reverse=True))
            wanted = (given for given in newest if owner is None or memory.jobs[given.job].spec.owner == owner)
            return list(islice((given for given in wanted if application in ("", given.application)), limit))

    def applications_of(self, owner: str) -> set[str]:
        with self._reading() as memory:
            return {application_of(job.spec) for job in memory.jobs.values() if job.spec.owner == owner} - {""}

    def runs(self, limit: int) -> list[Run]:
        with self._reading() as memory:
            taught = {ident: run for ident, job in memory.jobs.items() if (run := run_of(job)) is not None}
            return [*_newest(memory.runs, limit - len(taught)).values(), *_newest(taught, limit).values()]

    # Files

    def replicas(self) -> list[Replica]:
        with self._reading() as memory:
            return [replica for _, replica in sorted(memory.replicas.items())]

    def save_replicas(self, replicas: Sequence[Replica]) -> None:
        with self._writing() as memory:
            memory.replicas |= {(replica.name, replica.cluster): replica for replica in replicas}

    def remove_replicas(self, name: str, clusters: Sequence[ClusterName]) -> None:
        with self._writing() as memory:
            for cluster in clusters:
                memory.replicas.pop((name, cluster), None)

    def bundles(self) -> list[StoredBundle]:
        with self._reading() as memory:
            return list(memory.bundles.values())

    def save_bundles(self, bundles: Sequence[StoredBundle]) -> None:
        with self._writing() as memory:
            memory.bundles |= {bundle.id: bundle for bundle in bundles}

    def remove_bundle(self, bundle: str) -> None:
        with self._writing() as memory:
            memory.bundles.pop(bundle, None)

    def results(self, job: JobId, generation: int) -> list[StoredResult]:
        with self._reading() as memory:
            return [result for key, result in sorted(memory.results.items()) if key[:2] == (job, generation)]

    def results_sizes(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        with self._reading() as memory:
            for result in memory.results.values():
                sizes[memory.jobs[result.job].spec.owner] += result.size
        return {owner: size for owner, size in sizes.items() if size}

    def save_result(self, result: StoredResult) -> int:
        key = result.job, result.generation, result.rank
        with self._writing() as memory:
            replaced = [other for other in memory.results if other == key or (other[0] == key[0] and other[1] < key[1])]
            size = sum(memory.results.pop(other).size for other in replaced)
            memory.results[key] = result
            return size

    def old_results(self, before: float, owners: Collection[str] | None = None) -> dict[JobId, int]:
        with self._writing() as memory:
            sizes: dict[JobId, int] = defaultdict(int)
            for result in memory.results.values():
                sizes[result.job] += result.size
            jobs = [memory.jobs[job] for job, size in sizes.items() if size]
            ended = [(job.ended_at, job.id) for job in jobs if owners is None or job.spec.owner in owners]
            old = sorted((at, job) for at, job in ended if at is not None and at < before)
            return {job: sizes[job] for _, job in old}

    def clear_results(self, jobs: Collection[JobId]) -> int:
        with self._writing() as memory:
            theirs = {key: result for key, result in memory.results.items() if result.job in jobs}
            memory.results |= {key: replace(result, size=0) for key, result in theirs.items()}
            return sum(result.size for result in theirs.values())

    def forget_results(self, jobs: Sequence[JobId]) -> int:
        with self._writing() as memory:
            return sum(memory.results.pop(key).size for key in [key for key in memory.results if key[0] in jobs])

    # Tokens

    def tokens(self) -> list[StoredToken]:
        with self._reading() as memory:
            return [token for _, token in sorted(memory.tokens.items())]

    def save_tokens(self, tokens: Sequence[StoredToken]) -> None:
        with self._writing() as memory:
            memory.tokens |= {token.id: token for token in tokens}

    def remove_tokens(self, tokens: Collection[int]) -> None:
        with self._writing() as memory:
            memory.tokens = {number: token for number, token in memory.tokens.items() if number not in tokens}

    # The audit

    def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        with self._writing() as memory:
            _append(memory, entries)

    def audit_entries(self, which: AuditFilter) -> list[AuditEntry]:
        with self._reading() as memory:
            found = (
                entry
                for entry in (reversed(memory.audit) if which.newest_first else memory.audit)
                if entry.id > which.after
                and (not which.before or entry.id < which.before)
                and entry.at >= which.since
                and which.actor in ("", entry.actor)
                and which.action in ("", entry.action)
                and which.target in ("", entry.target)
                and which.outcome in ("", entry.outcome)
            )
            return list(islice(found, which.limit))

    def forget_audit(self, before: float) -> int:
        with self._writing() as memory:
            first = next((n for n, entry in enumerate(memory.audit) if entry.at >= before), len(memory.audit))
            del memory.audit[:first]
            return first

    def audit_head(self) -> AuditHead:
        with self._reading() as memory:
            return memory.audit_heads[-1] if memory.audit_heads else AuditHead()

    def audit_hash(self, entry: int) -> str | None:
        with self._reading() as memory:
            if entry <= memory.audited - len(memory.audit):
                return ""
            return next((head.hash for head in memory.audit_heads if head.id == entry), None)

    def check_audit(self, after: AuditHead | None, limit: int) -> AuditCheck:
        with self._reading() as memory:
            gone = memory.audited - len(memory.audit)
            removed = memory.audit_heads[gone - 1] if gone else AuditHead()
            checker = ChainChecker(removed if after is None or after.id < removed.id else after)
            left = [entry for entry in memory.audit if entry.id > checker.last.id]
            head = memory.audit_heads[-1] if memory.audit_heads else AuditHead()
            for entry in left[:limit]:
                if problem := checker.problem_of(entry, memory.audit_heads[entry.id - 1].hash):
                    return checker.result(head, is_end=False, problem=problem)
            return checker.result(head, is_end=len(left) < limit)

    # Jobs that are over

    def node_use(self, since: float) -> list[NodeUse]:
        with self._reading() as memory:
            return [
                NodeUse(job.spec.owner, part.size, part.claimed_at, part.ended_at)
                for job in memory.jobs.values()
                if not job.spec.internal
                for attempt in memory.attempts[job.id].values()
                if not (job.state.is_active and attempt.generation == job.generation)
                for part in attempt.components
                if part.claimed_at is not None and part.ended_at is not None and part.ended_at > since
                if part.claimed_at < part.ended_at
            ]

    def days(self, which: DayFilter) -> dict[Key, Figures]:
        found = Days()
        with self._reading() as memory:
            for key, figures in memory.days.items():
                if which.has(key):
                    found[Key(key.kind, which.period(key.day), key.name)].add(figures)
        return found

    def first_day(self) -> int | None:
        with self._reading() as memory:
            return min((key.day for key in memory.days if key.kind is Kind.GRID), default=None)

    def first_submission(self) -> float | None:
        with self._reading() as memory:
            return memory.jobs[min(memory.jobs)].submitted_at if memory.jobs else None

    def nodes_by_day(self, until: int) -> list[tuple[int, ClusterName, int]]:
        with self._reading() as memory:
            return [(day, name, nodes) for (day, name), nodes in sorted(memory.nodes.items()) if day <= until]

    def ended(self, after: tuple[float, JobId], until: float, limit: int) -> list[EndedJob]:
        with self._reading() as memory:
            over = [
                (job.ended_at, job.id)
                for job in memory.jobs.values()
                if job.state.is_final and not job.spec.internal and job.ended_at is not None and job.ended_at < until
            ]
            return [ended_job(memory.jobs[job]) for at, job in sorted(over) if (at, job) > after][:limit]

    def over(self, before: float, limit: int, *, internal: bool) -> list[JobId]:
        with self._reading() as memory:
            ended = [
                (job.ended_at, job.id)
                for job in memory.jobs.values()
                if job.state.is_final and job.spec.internal == internal and job.ended_at is not None
            ]
            return [job for at, job in sorted(ended) if at < before][:limit]

    def remove(self, jobs: Sequence[JobId]) -> None:
        with self._writing() as memory:
            memory.last_job = max([memory.last_job, *jobs])
            for ident in jobs:
                job = memory.jobs.pop(ident, None)
                if job and (run := run_of(job)) is not None:
                    memory.runs[ident] = run
                memory.attempts.pop(ident, None)
                memory.timeline.pop(ident, None)
            memory.runs = _newest(memory.runs, memory.max_runs)
            memory.submitted = {key: used for key, used in memory.submitted.items() if used.job not in jobs}
            memory.advised = {key: given for key, given in memory.advised.items() if key[0] not in jobs}
            memory.results = {key: result for key, result in memory.results.items() if key[0] not in jobs}
            memory.predictions = {key: told for key, told in memory.predictions.items() if key[0] not in jobs}

    def size(self) -> int | None:
        return None

    def shrink(self) -> bool:
        return False

    # Links

    def add(self, measurement: Measurement) -> None:
        def sort(of: Measurement) -> tuple[object, ...]:
            return of.one, of.other, of.kind

        with self._writing() as memory:
            same = [line for line in memory.measurements if sort(line) == sort(measurement)]
            if any(line.at == measurement.at for line in same):
                return
            memory.measurements.append(measurement)
            if len(same) >= memory.max_measurements:
                memory.measurements.remove(same[0])

    def latest(self) -> list[Measurement]:
        chosen: list[Measurement] = []
        seen: Counter[tuple[object, ...]] = Counter()
        with self._reading() as memory:
            for line in reversed(memory.measurements):
                sort = line.one, line.other, line.kind, bool(line.error)
                seen[sort] += 1
                good = line.kind is MeasurementKind.PINGPONG and not line.error
                if seen[sort] <= (MAX_PINGPONGS if good else 1):
                    chosen.append(line)
        return chosen[::-1]

    def history(self, one: ClusterName, other: ClusterName, limit: int) -> list[Measurement]:
        with self._reading() as memory:
            newest = (line for line in reversed(memory.measurements) if {line.one, line.other} == {one, other})
            return list(islice(newest, limit))


def _append(memory: Memory, entries: Iterable[AuditEntry]) -> None:
    for entry in entries:
        memory.audited += 1
        numbered = replace(entry, id=memory.audited)
        previous = memory.audit_heads[-1].hash if memory.audit_heads else ""
        memory.audit.append(numbered)
        memory.audit_heads.append(AuditHead(numbered.id, chain_hash(previous, numbered)))


def _unreported(record: ClusterRecord) -> ClusterRecord:
    """What survives a restart of the daemon; everything else is reported anew."""
    return replace(record, idle=0, used=0, background=0, down=0, processes_per_node=1, speed=1.0, details={})


def _matches(job: Job, which: JobFilter) -> bool:
    clusters = {part.cluster for part in job.attempt.gang} if job.attempt else set()
    return (
        (not which.states or job.state in which.states)
        and which.owner in ("", job.spec.owner)
        and which.name in ("", job.spec.name)
        and which.home_site in ("", job.spec.home_site)
        and which.application in ("", application_of(job.spec))
        and which.priority in ("", job.spec.priority)
        and job.restarts >= which.least_restarts
        and (which.most_restarts is None or job.restarts <= which.most_restarts)
        and (not which.cluster or which.cluster in clusters)
        and (which.before is None or job.id < which.before)
        and (which.ids is None or job.id in which.ids)
    )


def _newest(runs: dict[JobId, Run], limit: int) -> dict[JobId, Run]:
    """Those of the highest numbers, from the lowest on."""
    return dict(sorted(runs.items())[max(0, len(runs) - max(0, limit)) :])
