"""What sets an attempt apart from those of a database that was put back from a copy.

Revision: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("nonce", sa.String(32), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("attempts", "nonce")
