"""Days summed up, so that history is read without its jobs, and indices for what is asked of many jobs.

Revision: 0013
Revises: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

COUNTS = ("jobs", "succeeded", "failed", "cancelled", "restarts", "ran", "coallocated")
WITHIN = {"within_1m": 60, "within_10m": 600, "within_1h": 3600, "within_6h": 21600, "within_1d": 86400}
SPANS = {
    "queue_time": ("placed_at", "submitted_at"),
    "wait_time": ("started_at", "submitted_at"),
    "startup_overhead": ("started_at", "placed_at"),
    "run_time": ("ended_at", "started_at"),
    "response_time": ("ended_at", "submitted_at"),
}
NODES = ("node_seconds", "coallocated_node_seconds")
WHOLE = (*COUNTS, *WITHIN, "start_delays")
SUMS = (*SPANS, "slowdown", "start_delay", *NODES)
MAX_DAYS = 400
"""That one component can have lasted; more says that a clock was wrong."""


def upgrade() -> None:
    op.create_table(
        "days",
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False, server_default="0") for name in WHOLE),
        *(sa.Column(name, sa.Float, nullable=False, server_default="0") for name in SUMS),
        sa.Column("nodes", sa.Integer, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("kind", "day", "name", name="pk_days"),
    )
    op.create_index("ix_jobs_name_id", "jobs", ["name", "id"])
    op.create_index("ix_jobs_owner_state_id", "jobs", ["owner", "state", "id"])
    op.drop_index("ix_jobs_owner_id", "jobs")
    op.create_index("ix_audit_actor_id", "audit", ["actor", "id"])
    op.create_index("ix_audit_action_id", "audit", ["action", "id"])
    op.drop_index("ix_audit_actor_at", "audit")
    op.create_index("ix_advice_application_job_id", "advice", ["application", "job_id"])
    op.drop_index("ix_advice_application_at", "advice")
    kept = sa.text("size > 0")
    op.create_index("ix_results_kept", "results", ["job_id", "size"], sqlite_where=kept, postgresql_where=kept)
    if op.get_bind().execute(sa.text("select 1 from jobs limit 1")).first() is not None:
        _sum_up()


def _sum_up() -> None:
    """What the jobs that are there have left, as it will be with those that end from now on."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    _note_jobs(is_sqlite)
    _note_nodes(is_sqlite)
    names = ", ".join((*WHOLE, *SUMS))
    sums = ", ".join(f"coalesce(sum({name}), 0)" for name in (*WHOLE, *SUMS))
    op.execute(
        f"insert into days (kind, day, name, {names}, nodes) select kind, day, name, {sums}, 0 from koala_sums"
        " group by kind, day, name"
    )
    op.execute(
        "update days set nodes = coalesce((select total from clusters where clusters.name = days.name), 0)"
        " where kind = 'cluster'"
    )
    for table in ("koala_sums", "koala_jobs", "koala_parts"):
        op.execute(f"drop table {table}")


def _note_jobs(is_sqlite: bool) -> None:
    largest = "max" if is_sqlite else "greatest"
    policy = "json_extract(jobs.spec, '$.policy')" if is_sqlite else "jobs.spec ->> 'policy'"
    ran = (
        "(jobs.state in ('succeeded', 'failed') and attempts.barrier_at is not null and jobs.placed_at is not null"
        " and jobs.started_at is not null and jobs.ended_at is not null)"
    )
    spans = {name: f"{largest}(0, jobs.{end} - jobs.{start})" for name, (end, start) in SPANS.items()}
    slowdown = f"{largest}(1, {spans['response_time']} / {largest}(10, {spans['run_time']}))"
    clusters = (
        "(select count(distinct cluster) from components where components.job_id = jobs.id"
        " and components.generation = jobs.generation and not components.superseded)"
    )
    delay = "attempts.start_estimate - jobs.first_start_estimate"
    of_one = {
        "jobs": "1",
        **{state: f"case when jobs.state = '{state}' then 1 else 0 end" for state in COUNTS[1:4]},
        "restarts": "jobs.restarts",
        "ran": f"case when {ran} then 1 else 0 end",
        "coallocated": f"case when {ran} and {clusters} > 1 then 1 else 0 end",
        **{
            name: f"case when {ran} and {spans['queue_time']} <= {most} then 1 else 0 end"
            for name, most in WITHIN.items()
        },
        "start_delays": f"case when {ran} and {delay} is not null then 1 else 0 end",
        **{name: f"case when {ran} then {value} else 0 end" for name, value in spans.items()},
        "slowdown": f"case when {ran} then {slowdown} else 0 end",
        "start_delay": f"case when {ran} then coalesce({delay}, 0) else 0 end",
        **dict.fromkeys(NODES, "0.0"),
    }
    facts = ", ".join(f"{value} as {name}" for name, value in of_one.items())
    day = _day("coalesce(jobs.ended_at, jobs.submitted_at)", is_sqlite)
    op.execute(
        f"create temporary table koala_jobs as select jobs.id, jobs.generation, {day} as day, jobs.owner,"
        f" coalesce({policy}, '') as policy, jobs.priority, {facts} from jobs left join attempts"
        " on attempts.job_id = jobs.id and attempts.generation = jobs.generation"
        " where not jobs.internal and jobs.state in ('succeeded', 'failed', 'cancelled')"
    )
    sums = ", ".join(f"sum({name}) as {name}" for name in of_one)
    kinds = {"grid": "''", "user": "owner", "policy": "policy", "priority": "priority"}
    each = [
        f"select '{kind}' as kind, day, {name} as name, {sums} from koala_jobs group by 1, 2, 3"
        for kind, name in kinds.items()
    ]
    there = "(select distinct job_id, generation, cluster from components where not superseded)"
    each.append(
        f"select 'cluster', day, there.cluster, {sums} from koala_jobs join {there} there"
        " on there.job_id = koala_jobs.id and there.generation = koala_jobs.generation group by 1, 2, 3"
    )
    op.execute(f"create temporary table koala_sums as {' union all '.join(each)}")


def _note_nodes(is_sqlite: bool) -> None:
    """Attempts that jobs go on with are counted when they end."""
    smallest, largest = ("min", "max") if is_sqlite else ("least", "greatest")
    policy = "json_extract(jobs.spec, '$.policy')" if is_sqlite else "jobs.spec ->> 'policy'"
    clusters = (
        "(select count(distinct other.cluster) from components other where other.job_id = components.job_id"
        " and other.generation = components.generation and not other.superseded)"
    )
    since = f"{largest}(components.claimed_at, components.ended_at - {MAX_DAYS} * 86400.0)"
    op.execute(
        "create temporary table koala_parts as select components.cluster, jobs.owner,"
        f" coalesce({policy}, '') as policy, jobs.priority, components.size, {since} as since,"
        " components.ended_at as until,"
        f" {_day(since, is_sqlite)} as first, {_day('components.ended_at', is_sqlite)} as last,"
        f" case when {clusters} > 1 then 1.0 else 0.0 end as several"
        " from components join jobs on jobs.id = components.job_id where not jobs.internal"
        " and components.claimed_at < components.ended_at and (components.generation < jobs.generation"
        " or jobs.state in ('succeeded', 'failed', 'cancelled'))"
    )
    connection = op.get_bind()
    longest = connection.execute(sa.text("select max(last - first) from koala_parts")).scalar()
    kinds = {"grid": "''", "cluster": "cluster", "user": "owner", "policy": "policy", "priority": "priority"}
    for later in range(0 if longest is None else int(longest) + 1):
        begin = f"(first + {later}) * 86400.0"
        held = f"size * ({smallest}(until, {begin} + 86400.0) - {largest}(since, {begin}))"
        for kind, name in kinds.items():
            op.execute(
                f"insert into koala_sums (kind, day, name, node_seconds, coallocated_node_seconds)"
                f" select '{kind}', first + {later}, {name}, sum({held}), sum({held} * several) from koala_parts"
                f" where until > {begin} group by 1, 2, 3"
            )


def _day(moment: str, is_sqlite: bool) -> str:
    return f"cast({moment} / 86400.0 as integer)" if is_sqlite else f"cast(floor({moment} / 86400.0) as integer)"


def downgrade() -> None:
    op.drop_index("ix_results_kept", "results")
    op.create_index("ix_advice_application_at", "advice", ["application", "at"])
    op.drop_index("ix_advice_application_job_id", "advice")
    op.create_index("ix_audit_actor_at", "audit", ["actor", "at"])
    op.drop_index("ix_audit_action_id", "audit")
    op.drop_index("ix_audit_actor_id", "audit")
    op.create_index("ix_jobs_owner_id", "jobs", ["owner", "id"])
    op.drop_index("ix_jobs_owner_state_id", "jobs")
    op.drop_index("ix_jobs_name_id", "jobs")
    op.drop_table("days")
