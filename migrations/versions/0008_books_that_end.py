"""Jobs are not kept for ever: their numbers and what the advisor learned from them outlive them, and the daemon's own
jobs are known as such.

Revision: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("lease", sa.Column("last_job", BigId, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("internal", sa.Boolean(), nullable=False, server_default=sa.false()))
    jobs = sa.table("jobs", sa.column("owner"), sa.column("name"), sa.column("application"), sa.column("internal"))
    measuring = (jobs.c.owner == "koala") & jobs.c.name.like("network %-%") & (jobs.c.application == "")
    op.execute(sa.update(jobs).where(measuring).values(internal=sa.true()))
    op.drop_index(op.f("ix_jobs_ended_at"), "jobs")
    op.create_index(op.f("ix_jobs_internal_ended_at"), "jobs", ["internal", "ended_at"])
    op.create_index(op.f("ix_submissions_job_id"), "submissions", ["job_id"])
    op.create_table(
        "runs",
        sa.Column("job_id", BigId, autoincrement=False, nullable=False),
        sa.Column("run", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_runs")),
    )


def downgrade() -> None:
    op.drop_table("runs")
    op.drop_index(op.f("ix_submissions_job_id"), "submissions")
    op.drop_index(op.f("ix_jobs_internal_ended_at"), "jobs")
    op.create_index(op.f("ix_jobs_ended_at"), "jobs", ["ended_at"])
    op.drop_column("jobs", "internal")
    op.drop_column("lease", "last_job")
