"""When a job whose attempts keep failing is tried again.

Revision: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("retry_at", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "retry_at")
