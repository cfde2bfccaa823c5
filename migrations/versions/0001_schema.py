"""All tables, their indices, and the triggers that keep the audit as it is written.

Revision: 0001_schema
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001_schema"
down_revision = None
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JOB_STATES = (
    "('queued', 'held', 'placed', 'claiming', 'starting', 'running', 'unknown', 'succeeded', 'failed', 'cancelled')"
)
WITHOUT_TASKS = "array_job IS NULL"
COMPONENT_STATES = "('placed', 'submitted', 'waiting', 'claimed', 'running', 'stopping', 'delivering', 'ended')"


def create_index_where(name: str, columns: list[str], condition: str) -> None:
    """Create an index of the jobs that meet a condition."""
    where = sa.text(condition)
    op.create_index(name, "jobs", columns, sqlite_where=where, postgresql_where=where)


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("role", sa.String(12), nullable=False),
        sa.Column("how", sa.String(300), nullable=False),
        sa.Column("address", sa.String(100), nullable=False),
        sa.Column("action", sa.String(60), nullable=False),
        sa.Column("target", sa.String(300), nullable=False),
        sa.Column("outcome", sa.String(20), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.Column("hash", sa.String(64), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_action_id", "audit", ["action", "id"])
    op.create_index("ix_audit_actor_id", "audit", ["actor", "id"])
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_target_id", "audit", ["target", "id"])
    op.create_table(
        "audit_chain",
        sa.Column("one", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("head_id", BIG_ID, nullable=False),
        sa.Column("head_hash", sa.String(64), nullable=False),
        sa.Column("removed_id", BIG_ID, nullable=False),
        sa.Column("removed_hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("one", name="pk_audit_chain"),
    )
    op.create_table(
        "bundles",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.Column("owners", sa.JSON(), server_default="[]", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_bundles"),
    )
    op.create_table(
        "clusters",
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("errors", sa.Integer(), nullable=False),
        sa.Column("unusable", sa.Boolean(), nullable=False),
        sa.Column("last_heard", sa.Float()),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
        sa.Column("trials", sa.Integer(), server_default="0", nullable=False),
        sa.Column("drained_at", sa.Float()),
        sa.Column("drained_by", sa.String(200)),
        sa.Column("drained_reason", sa.Text()),
        sa.PrimaryKeyConstraint("name", name="pk_clusters"),
    )
    op.create_table(
        "days",
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("jobs", sa.Integer(), server_default="0", nullable=False),
        sa.Column("succeeded", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failed", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cancelled", sa.Integer(), server_default="0", nullable=False),
        sa.Column("restarts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("ran", sa.Integer(), server_default="0", nullable=False),
        sa.Column("coallocated", sa.Integer(), server_default="0", nullable=False),
        sa.Column("within_1m", sa.Integer(), server_default="0", nullable=False),
        sa.Column("within_10m", sa.Integer(), server_default="0", nullable=False),
        sa.Column("within_1h", sa.Integer(), server_default="0", nullable=False),
        sa.Column("within_6h", sa.Integer(), server_default="0", nullable=False),
        sa.Column("within_1d", sa.Integer(), server_default="0", nullable=False),
        sa.Column("start_delays", sa.Integer(), server_default="0", nullable=False),
        sa.Column("queue_time", sa.Float(), server_default="0", nullable=False),
        sa.Column("wait_time", sa.Float(), server_default="0", nullable=False),
        sa.Column("startup_overhead", sa.Float(), server_default="0", nullable=False),
        sa.Column("run_time", sa.Float(), server_default="0", nullable=False),
        sa.Column("response_time", sa.Float(), server_default="0", nullable=False),
        sa.Column("slowdown", sa.Float(), server_default="0", nullable=False),
        sa.Column("start_delay", sa.Float(), server_default="0", nullable=False),
        sa.Column("node_seconds", sa.Float(), server_default="0", nullable=False),
        sa.Column("coallocated_node_seconds", sa.Float(), server_default="0", nullable=False),
        sa.Column("nodes", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("kind", "day", "name", name="pk_days"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("priority", sa.String(8), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("ending", sa.String(12)),
        sa.Column("queue_seq", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("placement_tries", sa.Integer(), nullable=False),
        sa.Column("claiming_tries", sa.Integer(), nullable=False),
        sa.Column("counted_scan", sa.Integer(), server_default="0", nullable=False),
        sa.Column("submitted_at", sa.Float(), nullable=False),
        sa.Column("placed_at", sa.Float()),
        sa.Column("started_at", sa.Float()),
        sa.Column("ended_at", sa.Float()),
        sa.Column("exit_code", BIG_ID),
        sa.Column("claim_factor", sa.Float()),
        sa.Column("first_start_estimate", sa.Float()),
        sa.Column("retry_at", sa.Float()),
        sa.Column("refusals", sa.JSON()),
        sa.Column("awaits", sa.JSON()),
        sa.Column("eligible_at", sa.Float()),
        sa.Column("application", sa.String(200), server_default="", nullable=False),
        sa.Column("internal", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("home_site", sa.String(200), server_default="", nullable=False),
        sa.Column("tasks", sa.JSON(none_as_null=True)),
        sa.Column("array_size", sa.Integer(), server_default="0", nullable=False),
        sa.Column("array_job", BIG_ID),
        sa.Column("array_index", sa.BigInteger()),
        sa.CheckConstraint(f"ending in {JOB_STATES}", name="ck_jobs_ending"),
        sa.CheckConstraint("priority in ('high', 'low')", name="ck_jobs_priority"),
        sa.CheckConstraint(f"state in {JOB_STATES}", name="ck_jobs_state"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    create_index_where("ix_jobs_application_id", ["application", "id"], WITHOUT_TASKS)
    create_index_where("ix_jobs_array_job_id", ["array_job", "id"], "array_job IS NOT NULL")
    create_index_where("ix_jobs_arrays", ["id"], "array_size > 0")
    op.create_index(
        "ix_jobs_home_site_id",
        "jobs",
        ["home_site", "id"],
        sqlite_where=sa.text("home_site <> ''"),
        postgresql_where=sa.text("home_site <> ''"),
    )
    op.create_index("ix_jobs_internal_ended_at", "jobs", ["internal", "ended_at"])
    create_index_where("ix_jobs_name_id", ["name", "id"], WITHOUT_TASKS)
    create_index_where("ix_jobs_owner_state_id", ["owner", "state", "id"], WITHOUT_TASKS)
    create_index_where("ix_jobs_priority_id", ["priority", "id"], WITHOUT_TASKS)
    op.create_index(
        "ix_jobs_restarts_id",
        "jobs",
        ["restarts", "id"],
        sqlite_where=sa.text("restarts > 0"),
        postgresql_where=sa.text("restarts > 0"),
    )
    create_index_where("ix_jobs_state_id", ["state", "id"], WITHOUT_TASKS)
    op.create_table(
        "lease",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("instance", sa.String(32), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("batch", BIG_ID, server_default="0", nullable=False),
        sa.Column("last_job", BIG_ID, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_lease"),
    )
    op.create_table(
        "measurements",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("one", sa.String(100), nullable=False),
        sa.Column("other", sa.String(100), nullable=False),
        sa.Column("kind", sa.String(12), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("latency", sa.Float()),
        sa.Column("bandwidth", sa.Float()),
        sa.Column("job_id", BIG_ID),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("back", sa.Float()),
        sa.PrimaryKeyConstraint("id", name="pk_measurements"),
    )
    op.create_index("ix_measurements_one_other_at", "measurements", ["one", "other", "at"])
    op.create_table(
        "notifications",
        sa.Column("id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("channel", sa.String(12), nullable=False),
        sa.Column("to", sa.Text(), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_notifications"),
    )
    op.create_table(
        "samples",
        sa.Column("at", sa.Float(), autoincrement=False, nullable=False),
        *(
            sa.Column(name, sa.Integer(), nullable=False)
            for name in ("ours", "local", "idle", "queued", "started", "ended")
        ),
        sa.Column("startup", sa.Float()),
        sa.PrimaryKeyConstraint("at", name="pk_samples"),
    )
    op.create_table(
        "local_load",
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("local", sa.Float(), nullable=False),
        sa.Column("total", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("slot", "cluster", name="pk_local_load"),
    )
    op.create_table(
        "alert_marks",
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("target", sa.String(300), nullable=False),
        sa.Column("action", sa.String(12), nullable=False),
        sa.Column("by", sa.String(200), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "target", name="pk_alert_marks"),
    )
    op.create_table(
        "outbox",
        sa.Column("id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("written_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
    )
    op.create_table(
        "plans",
        sa.Column("job_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "generation", name="pk_plans"),
    )
    op.create_table(
        "queues",
        sa.Column("priority", sa.String(8), nullable=False),
        sa.Column("scans", sa.Integer(), nullable=False),
        sa.CheckConstraint("priority in ('high', 'low')", name="ck_queues_priority"),
        sa.PrimaryKeyConstraint("priority", name="pk_queues"),
    )
    op.create_table(
        "replicas",
        sa.Column("name", sa.String(1000), nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.String(64), nullable=False),
        sa.Column("parts", sa.JSON()),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("added_at", sa.Float(), nullable=False),
        sa.Column("verified_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", "cluster", name="pk_replicas"),
    )
    op.create_table(
        "runs",
        sa.Column("job_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("run", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_runs"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("role", sa.String(12), nullable=False),
        sa.Column("how", sa.String(300), nullable=False),
        sa.Column("note", sa.String(300), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.Float()),
        sa.Column("last_used_at", sa.Float()),
        sa.Column("revoked_at", sa.Float()),
        sa.Column("made_by", BIG_ID),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("digest", name="uq_tokens_digest"),
    )
    op.create_table(
        "advice",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("application", sa.String(200), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("clusters", sa.Integer(), nullable=False),
        sa.Column("predicted", sa.Float()),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actual", sa.Float()),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_advice_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "generation", name="pk_advice"),
    )
    op.create_index("ix_advice_application_job_id", "advice", ["application", "job_id"])
    op.create_table(
        "attempts",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("placed_at", sa.Float(), nullable=False),
        sa.Column("barrier_at", sa.Float()),
        sa.Column("launched_at", sa.Float()),
        sa.Column("ended_at", sa.Float()),
        sa.Column("exit_code", BIG_ID),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.Column("start_estimate", sa.Float()),
        sa.Column("claim_at", sa.Float()),
        sa.Column("nonce", sa.String(32), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "generation", name="pk_attempts"),
    )
    op.create_table(
        "components",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("request_index", sa.Integer()),
        sa.Column("hosts", sa.JSON(), nullable=False),
        sa.Column("lrm_job", sa.String(100)),
        sa.Column("exit_code", BIG_ID),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("infrastructure", sa.Boolean(), nullable=False),
        sa.Column("unknown_since", sa.Float()),
        sa.Column("lease", sa.Float()),
        sa.Column("lost_at", sa.Float()),
        sa.Column("claimed_at", sa.Float()),
        sa.Column("ended_at", sa.Float()),
        sa.Column("submitted_at", sa.Float()),
        sa.Column("sources", sa.JSON(), server_default="[]", nullable=False),
        sa.Column("transfer_time", sa.Float(), server_default="0", nullable=False),
        sa.Column("replaces", sa.Integer()),
        sa.Column("superseded", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("staging_since", sa.Float()),
        sa.Column("stage_size", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("staged", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("staged_at", sa.Float()),
        sa.Column("warned_at", sa.Float()),
        sa.Column("node_class", sa.String(1000), server_default="", nullable=False),
        sa.Column("measured_nodes", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cpu_time", sa.Float()),
        sa.Column("cpu_available", sa.Float()),
        sa.Column("peak_memory", sa.BigInteger()),
        sa.CheckConstraint(f"state in {COMPONENT_STATES}", name="ck_components_state"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_components_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "generation", "index", name="pk_components"),
    )
    op.create_index("ix_components_cluster_job_id", "components", ["cluster", "job_id"])
    op.create_index("ix_components_ended_at", "components", ["ended_at"])
    op.create_table(
        "history",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("clusters", sa.JSON(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("wait_time", sa.Float()),
        sa.Column("run_time", sa.Float()),
        sa.Column("node_seconds", sa.Float(), nullable=False),
        sa.Column("measured_nodes", sa.Integer(), nullable=False),
        sa.Column("cpu_time", sa.Float()),
        sa.Column("cpu_available", sa.Float()),
        sa.Column("peak_memory", sa.BigInteger()),
        sa.CheckConstraint(f"state in {JOB_STATES}", name="ck_history_state"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_history_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_history"),
    )
    op.create_index("ix_history_ended_at_job_id", "history", ["ended_at", "job_id"])
    for column in ("name", "owner", "state"):
        op.create_index(f"ix_history_{column}_ended_at_job_id", "history", [column, "ended_at", "job_id"])
    op.create_table(
        "history_clusters",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_history_clusters_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "cluster", name="pk_history_clusters"),
    )
    op.create_index(
        "ix_history_clusters_cluster_ended_at_job_id", "history_clusters", ["cluster", "ended_at", "job_id"]
    )
    op.create_table(
        "predictions",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("kind", sa.String(12), nullable=False),
        sa.Column("made_at", sa.Float(), nullable=False),
        sa.Column("source", sa.String(12), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("low", sa.Float(), nullable=False),
        sa.Column("middle", sa.Float(), nullable=False),
        sa.Column("high", sa.Float(), nullable=False),
        sa.Column("conditions", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_predictions_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "kind", "made_at", name="pk_predictions"),
    )
    op.create_index("ix_predictions_made_at", "predictions", ["made_at"])
    op.create_table(
        "results",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_results_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "generation", "rank", name="pk_results"),
    )
    op.create_index(
        "ix_results_kept",
        "results",
        ["job_id", "size"],
        sqlite_where=sa.text("size > 0"),
        postgresql_where=sa.text("size > 0"),
    )
    op.create_table(
        "submissions",
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_submissions_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("key", name="pk_submissions"),
    )
    op.create_index("ix_submissions_job_id", "submissions", ["job_id"])
    op.create_table(
        "timeline",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("event", sa.String(40), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("component", sa.Integer()),
        sa.Column("cluster", sa.String(100)),
        sa.Column("actor", sa.String(200), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_timeline_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_timeline"),
    )
    op.create_index("ix_timeline_job_id_id", "timeline", ["job_id", "id"])

    op.execute("insert into audit_chain values (1, 0, '', 0, '')")
    _protect_audit()


def _protect_audit() -> None:
    """Refuse changes of the audit. A daemon that removes old rows switches the trigger off for that transaction."""
    if op.get_bind().dialect.name == "sqlite":
        refuse = "begin select raise(abort, 'the audit is append-only'); end"
        op.execute(f"create trigger audit_is_kept before delete on audit {refuse}")
        op.execute(f"create trigger audit_is_unchanged before update on audit {refuse}")
        # REPLACE removes a row without the trigger of a removal; this one comes before it.
        op.execute(
            "create trigger audit_is_not_replaced before insert on audit "
            f"when exists (select 1 from audit where id = cast(new.id as integer)) {refuse}"
        )
        return
    op.execute(
        "create function audit_is_append_only() returns trigger language plpgsql as "
        "$$ begin raise exception 'the audit is append-only'; end $$"
    )
    for name, what in (("audit_is_kept", "delete"), ("audit_is_unchanged", "update"), ("audit_is_there", "truncate")):
        op.execute(
            f"create trigger {name} before {what} on audit for each statement execute function audit_is_append_only()"
        )


def downgrade() -> None:
    op.drop_table("timeline")
    op.drop_table("submissions")
    op.drop_table("results")
    op.drop_table("predictions")
    op.drop_table("history_clusters")
    op.drop_table("history")
    op.drop_table("components")
    op.drop_table("attempts")
    op.drop_table("advice")
    op.drop_table("tokens")
    op.drop_table("runs")
    op.drop_table("replicas")
    op.drop_table("queues")
    op.drop_table("plans")
    op.drop_table("outbox")
    op.drop_table("local_load")
    op.drop_table("samples")
    op.drop_table("alert_marks")
    op.drop_table("notifications")
    op.drop_table("measurements")
    op.drop_table("lease")
    op.drop_table("jobs")
    op.drop_table("days")
    op.drop_table("clusters")
    op.drop_table("bundles")
    op.drop_table("audit_chain")
    op.drop_table("audit")
    if op.get_bind().dialect.name != "sqlite":
        op.execute("drop function audit_is_append_only")
