"""Jobs are found by their priority and their restarts.

Revision: 0022
Revises: 0021
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_jobs_priority_id", "jobs", ["priority", "id"])
    restarted = sa.text("restarts > 0")
    op.create_index(
        "ix_jobs_restarts_id", "jobs", ["restarts", "id"], sqlite_where=restarted, postgresql_where=restarted
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_restarts_id", "jobs")
    op.drop_index("ix_jobs_priority_id", "jobs")
