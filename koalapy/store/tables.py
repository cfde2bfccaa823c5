"""The tables; ``migrations/`` makes the same (a test proves it). Times are seconds since the epoch, as floats."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

BigId = BigInteger().with_variant(Integer, "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=False),
    Column("name", String(200), nullable=False),
    Column("owner", String(200), nullable=False),
    Column("priority", String(8), nullable=False),
    Column("spec", JSON, nullable=False),
    Column("state", String(12), nullable=False),
    Column("reason", Text, nullable=False),
    Column("ending", String(12)),
    Column("queue_seq", BigInteger, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("restarts", Integer, nullable=False),
    Column("placement_tries", Integer, nullable=False),
    Column("claiming_tries", Integer, nullable=False),
    Column("submitted_at", Float, nullable=False),
    Column("placed_at", Float),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("exit_code", Integer),
    Index(None, "state", "id"),
    Index(None, "owner", "id"),
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
    Column("exit_code", Integer),
    Column("end_reason", Text, nullable=False),
)

components = Table(
    "components",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("cluster", String(100), nullable=False),
    Column("size", Integer, nullable=False),
    Column("state", String(12), nullable=False),
    Column("request_index", Integer),
    Column("hosts", JSON, nullable=False),
    Column("lrm_job", String(100)),
    Column("exit_code", Integer),
    Column("error", Text, nullable=False),
    Column("infrastructure", Boolean, nullable=False),
    Column("unknown_since", Float),
    Column("claimed_at", Float),
    Column("ended_at", Float),
    Index(None, "cluster", "job_id"),
)

timeline = Table(
    "timeline",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("at", Float, nullable=False),
    Column("event", String(40), nullable=False),
    Column("state", String(12), nullable=False),
    Column("reason", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("component", Integer),
    Column("cluster", String(100)),
    Index(None, "job_id", "id"),
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=False),
    Column("cluster", String(100), nullable=False),
    Column("payload", JSON, nullable=False),
    Column("written_at", Float, nullable=False),
)

submissions = Table(
    "submissions",
    metadata,
    Column("key", String(200), primary_key=True),
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("at", Float, nullable=False),
)

output = Table(
    "output",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("component", Integer, primary_key=True),
    Column("offset", BigInteger, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

clusters = Table(
    "clusters",
    metadata,
    Column("name", String(100), primary_key=True),
    Column("kind", String(20), nullable=False),
    Column("state", String(12), nullable=False),
    Column("reason", Text, nullable=False),
    Column("total", Integer, nullable=False),
    Column("errors", Integer, nullable=False),
    Column("unusable", Boolean, nullable=False),
    Column("last_heard", Float),
)

links = Table(
    "links",
    metadata,
    Column("source", String(100), primary_key=True),
    Column("target", String(100), primary_key=True),
    Column("measured_at", Float, primary_key=True),
    Column("latency", Float),
    Column("bandwidth", Float),
)

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("instance", String(32), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("holder", String(200), nullable=False),
    Column("expires_at", Float, nullable=False),
)
