"""The SQL tables; ``migrations/`` creates the same ones. Times are seconds since 1970, as floats."""

from dataclasses import fields
from enum import StrEnum

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
)
from sqlalchemy.types import TypeEngine

from koalapy.model.history import Figures, UseSum
from koalapy.model.job import ComponentState, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.reservation import ReservationState


class PlainText(TypeDecorator[str]):
    """A text column. NULs and lone surrogates, which PostgreSQL rejects and programs may write, are replaced."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _: Dialect) -> str | None:
        return None if value is None else _plain(value)


class Plain(TypeDecorator[str]):
    """A text column like ``PlainText``; longer values are truncated to its length."""

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._length = length

    def process_bind_param(self, value: str | None, _: Dialect) -> str | None:
        return None if value is None else _plain(value)[: self._length]


class Whole(TypeDecorator[int]):
    """An integer column; values out of its range become the largest or smallest possible value."""

    impl = BigInteger
    cache_ok = True

    def __init__(self, kind: TypeEngine[int] | None = None, bits: int = 64) -> None:
        super().__init__()
        self._kind, self._largest = kind or BigInteger(), 2 ** (bits - 1) - 1

    def load_dialect_impl(self, _: Dialect) -> TypeEngine[int]:
        return self._kind

    def process_bind_param(self, value: int | None, _: Dialect) -> int | None:
        return None if value is None else max(-self._largest, min(self._largest, value))


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


metadata = MetaData(
    naming_convention={
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)


def _one_of(column: str, values: type[StrEnum]) -> CheckConstraint:
    """Return a constraint that rejects values outside an enumeration."""
    return CheckConstraint(f"{column} in ({', '.join(repr(value.value) for value in values)})", name=column)


WITHOUT_TASKS = "array_job IS NULL"
"""Condition of the indices that find jobs for lists, which show arrays but not their tasks."""


def _index_where(name: str, condition: str, *columns: str) -> Index:
    """Return an index of the rows that meet a condition."""
    return Index(name, *columns, sqlite_where=text(condition), postgresql_where=text(condition))


def _index_without_tasks(*columns: str) -> Index:
    """Return an index that orders jobs by id within the values of columns."""
    return _index_where(f"ix_jobs_{'_'.join(columns)}_id", WITHOUT_TASKS, *columns, "id")


BigId = BigInteger().with_variant(Integer, "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=False),
    Column("name", Plain(200), nullable=False),
    Column("owner", Plain(200), nullable=False),
    Column("priority", Plain(8), nullable=False),
    Column("spec", JSON, nullable=False),
    Column("state", Plain(12), nullable=False),
    Column("reason", PlainText(), nullable=False),
    Column("ending", Plain(12)),
    Column("queue_seq", BigInteger, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("restarts", Integer, nullable=False),
    Column("placement_tries", Integer, nullable=False),
    Column("claiming_tries", Integer, nullable=False),
    Column("counted_scan", Integer, nullable=False, server_default="0"),
    Column("submitted_at", Float, nullable=False),
    Column("placed_at", Float),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("exit_code", Whole(BigId)),
    Column("claim_factor", Float),
    Column("first_start_estimate", Float),
    Column("retry_at", Float),
    Column("refusals", JSON),
    Column("awaits", JSON),
    Column("eligible_at", Float),
    Column("planned_start", JSON(none_as_null=True)),
    Column("application", Plain(200), nullable=False, server_default=""),
    # Of an array: its tasks, and their number.
    Column("tasks", JSON(none_as_null=True)),
    Column("array_size", Integer, nullable=False, server_default="0"),
    # Of a task: its array, and its index.
    Column("array_job", BigId),
    Column("array_index", BigInteger),
    _one_of("state", JobState),
    _one_of("ending", JobState),
    _one_of("priority", Priority),
    _index_without_tasks("state"),
    _index_without_tasks("application"),
    _index_without_tasks("priority"),
    Index(
        "ix_jobs_restarts_id",
        "restarts",
        "id",
        sqlite_where=text("restarts > 0"),
        postgresql_where=text("restarts > 0"),
    ),
    _index_without_tasks("owner", "state"),
    _index_without_tasks("name"),
    _index_where("ix_jobs_arrays", "array_size > 0", "id"),
    _index_where("ix_jobs_planned", "planned_start IS NOT NULL", "id"),
    _index_where("ix_jobs_array_job_id", "array_job IS NOT NULL", "array_job", "id"),
    Column("internal", Boolean, nullable=False, server_default=false()),
    Index(None, "internal", "ended_at"),
    Column("home_site", Plain(200), nullable=False, server_default=""),
    Index(
        "ix_jobs_home_site_id",
        "home_site",
        "id",
        sqlite_where=text("home_site <> ''"),
        postgresql_where=text("home_site <> ''"),
    ),
)

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("placed_at", Float, nullable=False),
    Column("barrier_at", Float),
    Column("launched_at", Float),
    Column("ended_at", Float),
    Column("exit_code", Whole(BigId)),
    Column("end_reason", PlainText(), nullable=False),
    Column("start_estimate", Float),
    Column("claim_at", Float),
    Column("nonce", Plain(32), nullable=False, server_default=""),
    Column("streams", BigInteger, nullable=False, server_default="0"),
    Column("relayed", JSON, nullable=False, server_default="[]"),
)

components = Table(
    "components",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("cluster", Plain(100), nullable=False),
    Column("size", Integer, nullable=False),
    Column("state", Plain(12), nullable=False),
    Column("request_index", Integer),
    Column("hosts", JSON, nullable=False),
    Column("lrm_job", Plain(100)),
    Column("exit_code", Whole(BigId)),
    Column("error", PlainText(), nullable=False),
    Column("infrastructure", Boolean, nullable=False),
    Column("unknown_since", Float),
    Column("lease", Float),
    Column("lost_at", Float),
    Column("claimed_at", Float),
    Column("ended_at", Float),
    Column("submitted_at", Float),
    Column("sources", JSON, nullable=False, server_default="[]"),
    Column("transfer_time", Float, nullable=False, server_default="0"),
    Column("replaces", Integer),
    Column("superseded", Boolean, nullable=False, server_default=false()),
    Column("staging_since", Float),
    Column("stage_size", Whole(), nullable=False, server_default="0"),
    Column("staged", Whole(), nullable=False, server_default="0"),
    Column("staged_at", Float),
    Column("warned_at", Float),
    Column("node_class", Plain(1000), nullable=False, server_default=""),
    Column("node_part", Float, nullable=False, server_default="1"),
    Column("measured_nodes", Integer, nullable=False, server_default="0"),
    Column("cpu_time", Float),
    Column("cpu_available", Float),
    Column("peak_memory", Whole()),
    _one_of("state", ComponentState),
    Index(None, "cluster", "job_id"),
    Index(None, "ended_at"),
)

# Ended jobs of users, in the order of their ends, with what lists of them select, sort and sum.
history = Table(
    "history",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("ended_at", Float, nullable=False),
    Column("owner", Plain(200), nullable=False),
    Column("name", Plain(200), nullable=False),
    Column("state", Plain(12), nullable=False),
    Column("clusters", JSON, nullable=False),
    Column("nodes", Integer, nullable=False),
    Column("wait_time", Float),
    Column("run_time", Float),
    Column("node_seconds", Float, nullable=False),
    Column("measured_nodes", Integer, nullable=False),
    Column("cpu_time", Float),
    Column("cpu_available", Float),
    Column("peak_memory", Whole()),
    _one_of("state", JobState),
    Index(None, "ended_at", "job_id"),
    Index(None, "owner", "ended_at", "job_id"),
    Index(None, "name", "ended_at", "job_id"),
    Index(None, "state", "ended_at", "job_id"),
)

history_clusters = Table(
    "history_clusters",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("cluster", Plain(100), primary_key=True),
    Column("ended_at", Float, nullable=False),
    Index(None, "cluster", "ended_at", "job_id"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=False),
    Column("digest", Plain(64), nullable=False, unique=True),
    Column("user", Plain(200), nullable=False),
    Column("role", Plain(12), nullable=False),
    Column("how", Plain(300), nullable=False),
    Column("note", Plain(300), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("created_by", Plain(200), nullable=False),
    Column("expires_at", Float),
    Column("last_used_at", Float),
    Column("revoked_at", Float),
    Column("made_by", BigId),
)

audit = Table(
    "audit",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("at", Float, nullable=False),
    Column("actor", Plain(200), nullable=False),
    Column("role", Plain(12), nullable=False),
    Column("how", Plain(300), nullable=False),
    Column("address", Plain(100), nullable=False),
    Column("action", Plain(60), nullable=False),
    Column("target", Plain(300), nullable=False),
    Column("outcome", Plain(20), nullable=False),
    Column("detail", PlainText(), nullable=False),
    Column("times", Integer, nullable=False),
    Column("hash", Plain(64), nullable=False, server_default=""),
    Index(None, "at"),
    Index(None, "actor", "id"),
    Index(None, "action", "id"),
    Index(None, "target", "id"),
)

# The last entry of the audit, and the last entry that was deleted by age, after which the remaining chain begins.
audit_chain = Table(
    "audit_chain",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("head_id", BigId, nullable=False),
    Column("head_hash", Plain(64), nullable=False),
    Column("removed_id", BigId, nullable=False),
    Column("removed_hash", Plain(64), nullable=False),
)

timeline = Table(
    "timeline",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("at", Float, nullable=False),
    Column("event", Plain(40), nullable=False),
    Column("state", Plain(12), nullable=False),
    Column("reason", PlainText(), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("component", Integer),
    Column("cluster", Plain(100)),
    Column("actor", Plain(200), nullable=False, server_default=""),
    Index(None, "job_id", "id"),
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=False),
    Column("cluster", Plain(100), nullable=False),
    Column("payload", JSON, nullable=False),
    Column("written_at", Float, nullable=False),
)

# The plans in commands that start a job's programs, once all its nodes have reported. All components of an attempt have
# the same plan.
plans = Table(
    "plans",
    metadata,
    Column("job_id", BigId, primary_key=True, autoincrement=False),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("text", PlainText(), nullable=False),
)

submissions = Table(
    "submissions",
    metadata,
    Column("key", Plain(200), primary_key=True),
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("digest", Plain(64), nullable=False),
    Column("at", Float, nullable=False),
    Index(None, "job_id"),
)

clusters = Table(
    "clusters",
    metadata,
    Column("name", Plain(100), primary_key=True),
    Column("kind", Plain(20), nullable=False),
    Column("state", Plain(12), nullable=False),
    Column("reason", PlainText(), nullable=False),
    Column("total", Whole(Integer(), bits=32), nullable=False),
    Column("errors", Integer, nullable=False),
    Column("unusable", Boolean, nullable=False),
    Column("last_heard", Float),
    Column("note", PlainText(), nullable=False, server_default=""),
    Column("trials", Integer, nullable=False, server_default="0"),
    Column("drained", JSON(none_as_null=True)),
    Column("planned_drains", JSON, nullable=False, server_default="[]"),
)

queues = Table(
    "queues",
    metadata,
    Column("priority", Plain(8), primary_key=True),
    Column("scans", Integer, nullable=False),
    _one_of("priority", Priority),
)

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("instance", Plain(32), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("holder", Plain(200), nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("batch", BigId, nullable=False, server_default="0"),
    Column("last_job", BigId, nullable=False, server_default="0"),
    Column("address", Plain(300), nullable=False, server_default=""),
)

skipped_jobs = Table(
    "skipped_jobs",
    metadata,
    Column("first", BigId, primary_key=True, autoincrement=False),
    Column("last", BigId, nullable=False),
)
"""Ranges of job numbers that no job of the database had: an older copy has lost them, or they were not used."""

replicas = Table(
    "replicas",
    metadata,
    Column("name", Plain(1000), primary_key=True),
    Column("cluster", Plain(100), primary_key=True),
    Column("path", PlainText(), nullable=False),
    Column("size", Whole(), nullable=False),
    Column("checksum", Plain(64), nullable=False),
    Column("parts", JSON),
    Column("state", Plain(12), nullable=False),
    Column("reason", PlainText(), nullable=False),
    Column("added_at", Float, nullable=False),
    Column("verified_at", Float, nullable=False),
)

bundles = Table(
    "bundles",
    metadata,
    Column("id", Plain(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("files", Integer, nullable=False),
    Column("used_at", Float, nullable=False),
    Column("owners", JSON, nullable=False, server_default="[]"),
)

results = Table(
    "results",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("cluster", Plain(100), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("files", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Index("ix_results_kept", "job_id", "size", sqlite_where=text("size > 0"), postgresql_where=text("size > 0")),
)

measurements = Table(
    "measurements",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("one", Plain(100), nullable=False),
    Column("other", Plain(100), nullable=False),
    Column("kind", Plain(12), nullable=False),
    Column("at", Float, nullable=False),
    Column("latency", Float),
    Column("bandwidth", Float),
    Column("job_id", BigId),
    Column("error", PlainText(), nullable=False),
    Column("back", Float),
    Index(None, "one", "other", "at"),
)

advice = Table(
    "advice",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("application", Plain(200), nullable=False),
    Column("at", Float, nullable=False),
    Column("clusters", Integer, nullable=False),
    Column("predicted", Float),
    Column("options", JSON, nullable=False),
    Column("reason", PlainText(), nullable=False),
    Column("actual", Float),
    Index(None, "application", "job_id"),
)

# Runs of deleted jobs, from which the advisor learns.
runs = Table(
    "runs",
    metadata,
    Column("job_id", BigId, primary_key=True, autoincrement=False),
    Column("run", JSON, nullable=False),
)

# Daily figures by day since 1970-01-01: of the grid, and by cluster, user, policy and priority.
days = Table(
    "days",
    metadata,
    Column("kind", Plain(8), primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("name", Plain(200), primary_key=True),
    *(
        Column(field.name, Integer if field.type is int else Float, nullable=False, server_default="0")
        for field in fields(Figures)
    ),
    # The maximum nodes of a cluster on that day.
    Column("nodes", Whole(Integer(), bits=32), nullable=False, server_default="0"),
)

# The sums of the samples of nodes and jobs, by slots of several lengths: of all clusters, and of each.
use_sums = Table(
    "use_sums",
    metadata,
    Column("length", Integer, primary_key=True, autoincrement=False),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("cluster", Plain(100), primary_key=True),
    *(
        Column(field.name, BigInteger if field.type is int else Float, nullable=False)
        for field in fields(UseSum)
        if field.name not in ("start", "cluster")
    ),
)

# Acknowledgements and silences of alerts.
alert_marks = Table(
    "alert_marks",
    metadata,
    Column("kind", Plain(40), primary_key=True),
    Column("target", Plain(300), primary_key=True),
    Column("action", Plain(12), nullable=False),
    Column("by", Plain(200), nullable=False),
    Column("at", Float, nullable=False),
    Column("until", Float, nullable=False),
    Column("reason", PlainText(), nullable=False),
)

reservations = Table(
    "reservations",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=False),
    Column("name", Plain(200), nullable=False),
    Column("site_name", Plain(100), nullable=False),
    Column("owner", Plain(200), nullable=False),
    Column("begins_at", Float, nullable=False),
    Column("ends_at", Float, nullable=False),
    Column("parts", JSON, nullable=False),
    Column("changed_at", Float, nullable=False),
    Column("users", JSON, nullable=False),
    Column("state", Plain(12), nullable=False),
    Column("reason", PlainText(), nullable=False),
    _one_of("state", ReservationState),
)

# The weights in fair share that operators have set; users without a row have the configured weight.
share_weights = Table(
    "share_weights",
    metadata,
    Column("user", Plain(200), primary_key=True),
    Column("weight", Float),
    Column("by", Plain(200), nullable=False),
    Column("reason", PlainText(), nullable=False),
    Column("at", Float, nullable=False),
)

# Notifications that are not delivered yet.
notifications = Table(
    "notifications",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("channel", Plain(12), nullable=False),
    Column("to", PlainText(), nullable=False),
    Column("owner", Plain(200), nullable=False),
    Column("body", JSON, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_at", Float, nullable=False),
)
