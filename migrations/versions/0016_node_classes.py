"""Which of its cluster's nodes a component was placed on, by the name of their class.

Revision: 0016
Revises: 0015
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("components", sa.Column("node_class", sa.String(1000), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("components", "node_class")
