"""When a component's program was told that it will be stopped.

Revision: 0015
Revises: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("components", sa.Column("warned_at", sa.Float))


def downgrade() -> None:
    op.drop_column("components", "warned_at")
