"""Which clusters have refused a job.

Revision: 0018
Revises: 0017
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("refusals", sa.JSON))


def downgrade() -> None:
    op.drop_column("jobs", "refusals")
