"""Store the planned start of each job, and how late the real one was."""

import sqlalchemy as sa
from alembic import op

revision = "0003_planned_starts"
down_revision = "0002_no_predictions"

HAS_ONE = sa.text("planned_start IS NOT NULL")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("planned_start", sa.JSON(), nullable=True))
    op.create_index("ix_jobs_planned", "jobs", ["id"], sqlite_where=HAS_ONE, postgresql_where=HAS_ONE)


def downgrade() -> None:
    op.drop_index("ix_jobs_planned", "jobs")
    op.drop_column("jobs", "planned_start")
