"""The bandwidth of a link's other way.

Revision: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("measurements", sa.Column("back", sa.Float))


def downgrade() -> None:
    op.drop_column("measurements", "back")
