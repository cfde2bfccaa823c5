"""The bandwidth of a link's other way.

Revision: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("measurements", sa.Column("back", sa.Float))


def downgrade() -> None:
    op.drop_column("measurements", "back")
