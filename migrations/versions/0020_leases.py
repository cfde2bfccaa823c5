"""After which silence of the daemon a component ends itself, and when it is certainly over.

Revision: 0020
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("components", sa.Column("lease", sa.Float))
    op.add_column("components", sa.Column("lost_at", sa.Float))


def downgrade() -> None:
    op.drop_column("components", "lost_at")
    op.drop_column("components", "lease")
