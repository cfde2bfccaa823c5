"""Read the facts that each side of a grid wrote by itself. Nothing is changed, and no file is loaded as a whole."""

import fcntl
import gzip
import json
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sqlalchemy import Connection, RowMapping, create_engine, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from koalapy.audit.facts import ArrayCounts, Fact, JobRecord, MissingRow, Output, Run, RunKind, Source, Submission
from koalapy.model.errors import UsageError
from koalapy.model.node_requirement import expand_host_list

CLAIM_LATENESS_S = 30.0
"""Seconds within which the daemon knows that nodes are free: a resource manager may be polled late, or hang."""
REPORT_LATENESS_S = 5.0
"""Seconds within which an agent reports the end of a program."""
_CHUNK = 1000
_NAME = re.compile(r"koala-([^-]+)-(\d+\.\d+\.\d+(?:\.[a-z0-9]+)?)")
_OUTPUT = re.compile(r"(.+)@(\d+)")
_ENDED_CLAIMS = ("placed", "delivering", "ended")
"""States in which a component has no nodes."""


class TokenParts(NamedTuple):
    """The parts of a component's token."""

    job: int
    attempt: int
    part: str
    nonce: str


def parse_token(token: str) -> TokenParts:
    """Split a token, ``job.attempt.component.nonce``. Raise ``ValueError`` for another text."""
    job, attempt, part, *nonce = token.split(".")
    return TokenParts(int(job), int(attempt), str(int(part)), nonce[0] if nonce else "")


def token_of(name: str) -> tuple[str, str] | None:
    """Return the daemon's instance and the token in the name of a job in a resource manager; None for other jobs."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def _make_run(
    source: Source, kind: RunKind, token: TokenParts, cluster: str, begin: float | None, **details: Any
) -> Run:
    """Return the run of a component with a token."""
    return Run(source, kind, token.job, token.attempt, token.part, cluster, begin, nonce=token.nonce, **details)


@dataclass(frozen=True, slots=True)
class GridFiles:
    """Where the evidence of a grid is. Folders of agents and accountings have the names of their clusters, or none."""

    data: Path
    database: str = ""
    """URL; empty: the SQLite database of the data directory."""
    spools: tuple[tuple[str, Path], ...] = ()
    accountings: tuple[tuple[str, Path], ...] = ()


def read_grid(files: GridFiles) -> Iterator[Fact]:
    """Yield all facts of a grid, those of embedded clusters included. The grid may be running.

    The database is read after all that it must hold, and before the output that is stored until a job ends. Raise
    ``UsageError``.
    """
    url = files.database or f"sqlite:///{files.data}/koala.db"
    instance = read_instance(url)
    folders = sorted(path for path in files.data.glob("clusters/*") if path.is_dir())
    for cluster, path in (*files.accountings, *((f.name, f / "lrm" / "accounting") for f in folders)):
        if path.exists() or (cluster, path) in files.accountings:
            yield from read_accounting(path, cluster, instance)
    for cluster, path in (*files.spools, *((f.name, f / "spool") for f in folders)):
        if not path.is_dir():
            raise UsageError(f"the spool folder {path} does not exist", hint="check --spool")
        yield from read_spool(path, cluster, instance)
    yield from read_record(files.data / "record")
    yield from read_database(url)
    yield from read_output(files.data / "output")


# The database


@contextmanager
def _connect(url: str) -> Iterator[Connection]:
    """Open a database of SQLite or PostgreSQL in a read-only transaction. Raise ``UsageError``.

    All statements see one snapshot. Keep it short: it keeps the daemon from reusing the space of its log.
    """
    try:
        parts = make_url(url)
        if parts.drivername.startswith("sqlite"):
            if not parts.database or not Path(parts.database).is_file():
                raise UsageError(
                    f"the database {parts.database} does not exist", hint="check --data-dir and --database"
                )
            engine, begin = create_engine(f"sqlite:///file:{parts.database}?mode=ro&uri=true"), "BEGIN"
        else:
            engine = create_engine(parts.set(drivername="postgresql+psycopg"), isolation_level="REPEATABLE READ")
            begin = "SET TRANSACTION READ ONLY"
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql(begin)
                yield connection.execution_options(yield_per=_CHUNK)
        finally:
            engine.dispose()
    except (SQLAlchemyError, ArgumentError, ModuleNotFoundError) as error:
        raise UsageError(
            f"the database cannot be read: {str(error).splitlines()[0]}", hint="check --database"
        ) from error


def read_instance(url: str) -> str:
    """Return the daemon's instance by its database; empty if no daemon has used it. Raise ``UsageError``."""
    with _connect(url) as connection:
        return next((row["instance"] for row in _rows(connection, "SELECT instance FROM lease")), "")


def read_database(url: str) -> Iterator[Fact]:
    """Yield what a database holds. Raise ``UsageError``."""
    with _connect(url) as connection:
        removed = next((row["last_job"] for row in _rows(connection, "SELECT last_job FROM lease")), 0)
        has_skipped = inspect(connection).has_table("skipped_jobs")  # an earlier version has not
        numbers = _rows(connection, "SELECT * FROM skipped_jobs") if has_skipped else ()
        skipped = tuple((row["first"], row["last"]) for row in numbers)
        database = Source("database", read_at=time.time(), removed_to=removed, skipped=skipped)
        claims = replace(database, lateness_s=CLAIM_LATENESS_S)
        yield from (_job_record(row, database) for row in _rows(connection, _JOBS))
        for row in _rows(connection, "SELECT key, job_id FROM submissions"):
            yield Submission(database, row["key"], row["job_id"])
        for row in _rows(connection, _OUTPUT_GAPS):
            yield Output(database, row["job_id"], row["generation"], str(row["component"]), gap_announced=True)
        yield from (_claim(row, claims) for row in _rows(connection, _COMPONENTS))
        # Sequences of PostgreSQL have gaps, and so have lines of jobs that were removed by age.
        is_numbered = connection.dialect.name == "sqlite" and not removed
        for row in _rows(connection, _MISSING + _MISSING_NUMBERS * is_numbered):
            yield MissingRow(database, row["job_id"], row["attempt"], row["missing"])


_JOBS = """
SELECT id AS job, state, generation AS attempt, exit_code, reason, submitted_at, ended_at, spec, tasks,
    array_job AS task_of, array_index AS "index",
    (SELECT min(id) FROM timeline WHERE job_id = j.id AND event = 'placed') AS placed_line,
    (SELECT max(id) FROM timeline WHERE job_id = j.id AND state = j.state AND j.ended_at IS NOT NULL) AS ended_line
    FROM jobs j
"""
_OUTPUT_GAPS = "SELECT job_id, generation, component FROM timeline WHERE component >= 0 AND event = 'output-missing'"
_COMPONENTS = """
SELECT c.job_id AS job, c.generation AS attempt, c."index" AS part, c.cluster, c.claimed_at AS begin,
    c.ended_at AS end_at, c.state, c.size, c.hosts AS nodes, c.lrm_job AS run_id, c.unknown_since, c.lost_at,
    c.superseded, a.nonce
FROM components c LEFT JOIN attempts a ON a.job_id = c.job_id AND a.generation = c.generation
"""
_MISSING = """
SELECT job_id, 0 AS attempt, 'job' AS missing FROM (SELECT job_id FROM attempts UNION SELECT job_id FROM components
    UNION SELECT job_id FROM timeline UNION SELECT job_id FROM submissions UNION SELECT job_id FROM history
    UNION SELECT job_id FROM history_clusters EXCEPT SELECT id FROM jobs) x
UNION ALL SELECT job_id, generation, 'attempt' FROM (SELECT id AS job_id, generation FROM jobs WHERE generation > 0
    UNION SELECT job_id, generation - 1 FROM attempts WHERE generation > 1
    EXCEPT SELECT job_id, generation FROM attempts) x
UNION ALL SELECT job_id, generation, 'component ' || part FROM (SELECT job_id, generation, 0 AS part FROM attempts UNION
    SELECT job_id, generation, component FROM timeline WHERE component > 0 UNION SELECT job_id, generation, "index" - 1
    FROM components WHERE "index" > 0 EXCEPT SELECT job_id, generation, "index" FROM components) x
UNION ALL SELECT h.job_id, generation, 'component' FROM history h JOIN jobs j ON j.id = h.job_id WHERE nodes <> (SELECT
    coalesce(sum(size), 0) FROM components WHERE job_id = j.id AND generation = j.generation AND NOT superseded)
UNION ALL SELECT job_id, generation, event || ' in the timeline' FROM (
    SELECT job_id, generation, 'claimed' AS event, "index" AS part FROM components WHERE claimed_at IS NOT NULL
    UNION SELECT job_id, generation, 'claiming', NULL FROM components WHERE submitted_at IS NOT NULL
    UNION SELECT job_id, generation, 'placed', NULL FROM attempts UNION SELECT id, 0, 'submitted', NULL FROM jobs
    UNION SELECT job_id, generation, 'started', NULL FROM attempts WHERE barrier_at IS NOT NULL
    UNION SELECT job_id, generation, 'running', NULL FROM attempts a WHERE launched_at IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM timeline WHERE job_id = a.job_id AND generation = a.generation
        AND event = 'unknown')
    EXCEPT SELECT job_id, generation, event, component FROM timeline) x
UNION ALL SELECT id, generation, state || ' in the timeline' FROM jobs j
    WHERE state <> (SELECT state FROM timeline WHERE job_id = j.id ORDER BY id DESC LIMIT 1)
UNION ALL SELECT id, 0, 'history' FROM (SELECT id FROM jobs WHERE NOT internal AND tasks IS NULL
    AND state IN ('succeeded', 'failed', 'cancelled') EXCEPT SELECT job_id FROM history) x
UNION ALL SELECT job_id, 0, 'history of ' || cluster FROM (SELECT h.job_id, cluster FROM history h JOIN jobs j
    ON j.id = h.job_id JOIN components c ON c.job_id = j.id AND c.generation = j.generation AND NOT c.superseded
    EXCEPT SELECT job_id, cluster FROM history_clusters) x
"""
"""Rows that the database lacks, though a row of the same transaction or of a later one needs each of them."""
_MISSING_NUMBERS = """
UNION ALL SELECT t.job_id, generation, 'line ' || x.id || ' of the timeline' FROM
    (SELECT id - 1 AS id FROM timeline WHERE id > 1 EXCEPT SELECT id FROM timeline) x JOIN timeline t ON t.id = x.id + 1
"""
"""The same, if lines are numbered without gaps."""


def _rows(connection: Connection, statement: str) -> Iterator[RowMapping]:
    yield from connection.execute(text(statement)).mappings()


def _from_json(value: Any) -> Any:
    """Return a value of a JSON column, which SQLite returns as text."""
    return json.loads(value) if isinstance(value, str) else value


def _job_record(row: RowMapping, source: Source) -> JobRecord:
    values = dict(row)
    spec, tasks = _from_json(values.pop("spec")), _from_json(values.pop("tasks"))
    if tasks is not None:
        ranges = tuple((first, last, step) for first, last, step in (spec.get("array") or {}).get("ranges", ()))
        counts = {name: tasks[name] for name in ("size", "succeeded", "failed", "cancelled")}
        values["array"] = ArrayCounts(ranges=ranges, **counts)
    clauses = tuple(tuple((entry["job"], entry["condition"]) for entry in clause) for clause in spec.get("after", ()))
    has_one_code = spec.get("launcher", "openmpi") == "openmpi"
    return JobRecord(source, shares=bool(spec.get("share")), has_one_code=has_one_code, after=clauses, **values)


def _claim(row: RowMapping, source: Source) -> Run:
    values = dict(row) | {name: row[name] or "" for name in ("nonce", "run_id")}
    has_ended, lost_at = values.pop("state") in _ENDED_CLAIMS, values.pop("lost_at")
    values |= {"part": str(row["part"]), "nodes": tuple(_from_json(row["nodes"])), "end": values.pop("end_at")}
    values |= {"superseded": bool(row["superseded"]), "lease_over_at": lost_at if has_ended else None}
    return Run(source, RunKind.CLAIM, has_ended=has_ended or row["unknown_since"] is not None, **values)


def read_output(folder: Path) -> Iterator[Output]:
    """Yield how much output of each component the daemon stores in the folder ``output`` of its data directory."""
    source = Source("stored output")
    for job_folder in sorted(folder.iterdir()) if folder.is_dir() else ():
        ends: dict[str, int] = {}
        for path in job_folder.glob("*@*"):
            if match := _OUTPUT.fullmatch(path.name):
                with suppress(OSError):
                    ends[match[1]] = max(ends.get(match[1], 0), int(match[2]) + path.stat().st_size)
        for token, end in ends.items():
            parts = parse_token(token)
            yield Output(source, parts.job, parts.attempt, parts.part, stored=end)


# The record of events


@dataclass(slots=True)
class _Reported:
    """What the record of events tells of one component."""

    cluster: str
    begin: float | None = None
    over_at: float | None = None
    is_opened: bool = False
    is_cut: bool = False
    """Whether its agent or the daemon was away, so that the time of its end is not known."""
    status: dict[str, Any] = field(default_factory=dict)


def read_record(folder: Path) -> Iterator[Run]:
    """Yield the programs that agents reported, by the daemon's record of events.

    A killed daemon loses the last steps of its record, so each daemon run is a separate source, which knows nothing
    beyond its last step: the file may have been written later. Nothing is known of what began before the end of its
    first part, if others were removed.
    """
    files = [path.name for path in folder.glob("*.jsonl*") if path.suffix != ".incoming"]
    parts = {name.removesuffix(".gz"): folder / name for name in sorted(files)}
    source = Source("record of events", lateness_s=REPORT_LATENESS_S)
    live: dict[str, _Reported] = {}
    holding: dict[str, tuple[float, list[str]]] = {}
    for began, names in groupby(sorted(parts), key=lambda name: name.partition("-")[0]):
        paths = [parts[name] for name in names]
        is_whole = paths[0].name.startswith(f"{began}-000001.")
        since = int(began) / 1000 if is_whole else _last_write(paths[0])
        source = replace(source, since=since, read_at=_last_step(paths) or since)
        for component in live.values():
            component.is_cut = True
        for step in chain.from_iterable(map(_read_steps, paths)):
            for command, cluster, token in (step.get("done") or ((), (), ()))[2]:
                if command == "OpenBarrier":
                    live.setdefault(token, _Reported(cluster)).is_opened = True
            for event in step.get("events", ()):
                yield from _apply_event(event, step["at"], live, holding, source)
    yield from (_reported_program(token, component, source) for token, component in live.items() if component.begin)
    for cluster, (seen_at, tokens) in holding.items():
        for token in tokens:
            now = replace(source, read_at=seen_at)
            yield _make_run(now, RunKind.HELD, parse_token(token), cluster, None, has_ended=False)


def _read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of a file of the record, up to a line that was cut, or spoiled by a loss of power."""
    with suppress(EOFError, gzip.BadGzipFile, zlib.error, ValueError), _open_part(path) as file:
        for line in gzip.GzipFile(fileobj=file) if file.name.endswith(".gz") else file:
            if "at" in (step := json.loads(line.decode())):
                yield step


def _last_step(paths: list[Path]) -> float | None:
    """Return the time of the last step in the files of a daemon run; None if there is no step."""
    lasts = (deque(_read_steps(path), maxlen=1) for path in reversed(paths))
    return next((last[0]["at"] for last in lasts if last), None)


def _last_write(path: Path) -> float:
    with _open_part(path) as file:
        return os.fstat(file.fileno()).st_mtime


def _open_part(path: Path) -> BinaryIO:
    """Open a file of the record, compressed or not. The daemon may compress it at any time.

    Raise ``UsageError`` if it was removed: without it, programs that ran would seem not to have run.
    """
    try:
        with suppress(FileNotFoundError):
            return path.open("rb")
        return path.with_name(f"{path.name}.gz").open("rb")
    except OSError as error:
        hint = "repeat the audit: the daemon removes old parts of its record"
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error


def _apply_event(
    event: list[Any], at: float, live: dict[str, _Reported], holding: dict[str, tuple[float, list[str]]], source: Source
) -> Iterator[Run]:
    """Update the components from an event, and yield the programs that have ended with it."""
    kind = event[0]
    if kind == "Reported" and event[2] == "ClusterReport":
        holding[event[1]] = at, event[3].get("holding", [])
    elif kind == "AgentDisconnected":
        for component in live.values():
            component.is_cut |= component.cluster == event[1]["cluster"]
    elif kind == "Reported" and event[2] == "ComponentStatus":
        yield from _apply_status(event[1], event[3], at, live, source)
    elif kind == "InventoryReceived":
        for status in event[1]["inventory"].get("components", ()):
            yield from _apply_status(event[1]["cluster"], status, at, live, source)


def _apply_status(
    cluster: str, status: dict[str, Any], time: float, live: dict[str, _Reported], source: Source
) -> Iterator[Run]:
    token, state = status["token"], status["state"]
    if state == "ended" and token not in live:
        return  # a repeated report, or a component that never had nodes
    component = live.setdefault(token, _Reported(cluster))
    component.status |= status
    has_run = state == "running" or status.get("program_exit") is not None or status.get("use") is not None
    if state == "ended":
        has_run |= component.is_opened and not status.get("error")
    if has_run and component.begin is None:
        component.begin = time
    if component.over_at is None and (status.get("over") or state == "ended"):
        component.over_at = time
    if state == "ended":
        del live[token]
        if component.begin is not None:
            yield _reported_program(token, component, source)


def _reported_program(token: str, component: _Reported, source: Source) -> Run:
    """Return the program of a component, with the time at which its end was reported."""
    status = component.status
    end, nodes = None if component.is_cut else component.over_at, tuple(status.get("hosts", ()))
    details = {"exit_code": status.get("program_exit"), "run_id": status.get("lrm_job") or ""}
    cluster, begin = component.cluster, component.begin
    return _make_run(source, RunKind.PROGRAM, parse_token(token), cluster, begin, end=end, nodes=nodes, **details)


# Agents


def read_spool(folder: Path, cluster: str = "", instance: str = "") -> Iterator[Fact]:
    """Yield what an agent's journals and the results of its runners tell of components that it has not forgotten.

    ``cluster``: default is the name of the folder above, as in ``clusters/NAME/spool``; ``instance``: only components
    of this daemon. Journals hold no times.
    """
    cluster = cluster or folder.parent.name
    now = time.time()
    source = Source(f"journals of {cluster}", f"cluster {cluster}", since=now, read_at=now)  # the rest is forgotten
    for journal in sorted(folder.glob(f"{instance or '*'}/*/journal")):
        with suppress(ValueError, OSError):
            yield from _read_journal(journal, parse_token(journal.parent.name), cluster, source)


def _read_journal(path: Path, token: TokenParts, cluster: str, source: Source) -> Iterator[Fact]:
    entries: dict[str, Any] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        entries |= json.loads(line.rpartition(b" ")[0])
    results = {name: entry for name, entry in entries.items() if name.startswith("result.")}
    end, size = entries.get("end"), entries.get("submit", {}).get("size", 0)
    details: dict[str, Any] = {"size": size, "run_id": entries.get("lrm") or ""}
    if details["run_id"]:
        yield _make_run(source, RunKind.HELD, token, cluster, None, has_ended=end is not None, **details)
    if entries.get("open") is not None:
        codes = [entry["code"] for entry in results.values() if entry.get("code") is not None]
        details["exit_code"] = end["exit_code"] if end else next((code for code in codes if code), None)
        nodes = tuple(entry["name"] for entry in results.values() if entry.get("name"))
        yield _make_run(source, RunKind.PROGRAM, token, cluster, None, nodes=nodes, **details)
    written = [int(_read_result(result).get("output") or 0) for result in path.parent.glob("result.*.json")]
    if written:
        yield Output(source, token.job, token.attempt, token.part, written=sum(written))


def _read_result(path: Path) -> dict[str, Any]:
    """Return the result that a runner saved, without checking its tag; empty if there is none."""
    try:
        result = json.loads(path.read_bytes().partition(b"{")[2].join((b"{", b"")))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


# Resource managers


def read_accounting(path: Path, cluster: str = "", instance: str = "") -> Iterator[Run]:
    """Yield the jobs of the grid in an accounting: of ``sacct``, ``qacct -j``, or of an embedded cluster.

    See docs/audit.md for the commands. ``cluster``: default is the name of the folder two above, as in
    ``clusters/NAME/lrm/accounting``. ``instance``: only jobs of this daemon. Raise ``UsageError`` for another file.
    """
    try:
        read_at = path.stat().st_mtime
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
            file.seek(0)
            if first.startswith(("{", "\0")):  # a loss of power leaves zeros
                cluster = cluster or path.absolute().parents[1].name
                source = Source(f"accounting of {cluster}", read_at=time.time() if _is_locked(path) else read_at)
                runs = _read_embedded(file, cluster, source)
            elif (is_slurm := "|" in first and "JobName" in first) or not first.strip() or first.startswith("==="):
                name, read = ("sacct", _read_sacct) if is_slurm else ("qacct", _read_qacct)
                source = Source(f"{name} of {cluster}", f"cluster {cluster}", resolution_s=1.0, read_at=read_at)
                runs = read(file, cluster, source)
            else:
                raise UsageError(
                    f"{path} is no accounting that koala knows: it begins with {first[:40]!r}",
                    hint="write it with the commands of docs/audit.md",
                )
            for run_instance, run in runs:
                if instance in ("", run_instance):
                    yield run
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint="check --accounting") from error


def _held(source: Source, cluster: str, name: str, begin: float | None, **details: Any) -> Iterator[tuple[str, Run]]:
    """Yield the daemon's instance and the run of a job in a resource manager, if it is a job of the grid."""
    if (token_parts := token_of(name)) is not None:
        yield token_parts[0], _make_run(source, RunKind.HELD, parse_token(token_parts[1]), cluster, begin, **details)


def _is_locked(path: Path) -> bool:
    """Return whether the resource manager that writes an embedded cluster's accounting is alive."""
    try:
        with (path.parent / "locald.pid").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _read_embedded(file: Iterable[str], cluster: str, source: Source) -> Iterator[tuple[str, Run]]:
    """Read lines of JSON: one at the start of a job, one at its end, one without a job at the start of the manager."""
    started: dict[str, dict[str, Any]] = {}
    for line in file:
        with suppress(ValueError):  # a line that was cut when the machine failed
            fields = json.loads(line.strip("\0"))
            ended = [started.pop(fields["job"], {})] if "job" in fields else list(started.values())
            if "nodes" in fields:
                started[fields["job"]] = fields
                continue
            started = started if "job" in fields else {}
            for entry in filter(None, ended):
                yield from _embedded_job(entry, cluster, source, fields.get("end"), has_ended=True)
    for entry in started.values():
        yield from _embedded_job(entry, cluster, source, None, has_ended=False)


def _embedded_job(
    entry: dict[str, Any], cluster: str, source: Source, end: float | None, *, has_ended: bool
) -> Iterator[tuple[str, Run]]:
    details = {"end": end, "has_ended": has_ended, "nodes": tuple(entry["nodes"]), "run_id": entry["job"]}
    yield from _held(source, cluster, entry["name"], entry["begin"], **details)


def _read_sacct(file: Iterable[str], cluster: str, source: Source) -> Iterator[tuple[str, Run]]:
    lines = iter(file)
    header = next(lines).strip().split("|")
    for line in lines:
        row = dict(zip(header, line.rstrip("\n").split("|"), strict=False))
        begin, end = _parse_moment(row.get("Start", "")), _parse_moment(row.get("End", ""))
        nodes: list[str] = []
        with suppress(ValueError):
            nodes = expand_host_list(row.get("NodeList", ""))
        details = {"end": end, "has_ended": end is not None, "nodes": tuple(nodes), "run_id": row.get("JobIDRaw", "")}
        if begin is not None:  # else it never had nodes
            yield from _held(source, cluster, row.get("JobName", ""), begin, **details)


def _read_qacct(file: Iterable[str], cluster: str, source: Source) -> Iterator[tuple[str, Run]]:
    """Read records of ended jobs. Each tells one node; those of a job on several nodes follow one another."""
    last: dict[str, str] = {}
    nodes: list[str] = []
    record: dict[str, str] = {}
    for line in chain(file, ("===", "===")):
        if not line.startswith("==="):
            key, _, value = line.strip().partition(" ")
            record[key] = value.strip()
            continue
        if last and record.get("jobnumber") != last.get("jobnumber"):
            end = _parse_moment(last.get("end_time", ""))
            if (begin := _parse_moment(last.get("start_time", ""))) is not None:
                details = {"end": end, "nodes": tuple(nodes), "run_id": last.get("jobnumber", "")}
                yield from _held(source, cluster, last.get("jobname", ""), begin, **details)
            nodes = []
        if record.get("hostname"):
            nodes.append(record["hostname"])
        last, record = record, {}


_TIME_FORMATS = ("%Y-%m-%dT%H:%M:%S", "%a %b %d %H:%M:%S %Y", "%m/%d/%Y %H:%M:%S.%f", "%m/%d/%Y %H:%M:%S")


def _parse_moment(value: str) -> float | None:
    """Return a time of ``sacct`` or ``qacct``, in UTC if it names no zone; None for none."""
    if re.fullmatch(r"\d{9,11}(\.\d+)?", value):
        return float(value)
    for form in _TIME_FORMATS:
        with suppress(ValueError):
            return datetime.strptime(value, form).replace(tzinfo=UTC).timestamp()
    return None
