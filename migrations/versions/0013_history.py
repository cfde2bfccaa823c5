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
WITHIN = ("within_1m", "within_10m", "within_1h", "within_6h", "within_1d")
SUMS = ("queue_time", "wait_time", "startup_overhead", "run_time", "response_time", "slowdown")
NODES = ("node_seconds", "coallocated_node_seconds", "capacity")


def upgrade() -> None:
    op.create_table(
        "days",
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False, server_default="0") for name in (*COUNTS, *WITHIN)),
        *(sa.Column(name, sa.Float, nullable=False, server_default="0") for name in (*SUMS, *NODES)),
        sa.PrimaryKeyConstraint("kind", "day", "name", name="pk_days"),
    )
    op.add_column("lease", sa.Column("summed_until", sa.Float))
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
    op.drop_column("lease", "summed_until")
    op.drop_table("days")
