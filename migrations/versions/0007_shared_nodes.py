"""Store which part of each node a component is charged for."""

import sqlalchemy as sa
from alembic import op

revision = "0007_shared_nodes"
down_revision = "0006_lease_address"


def upgrade() -> None:
    op.add_column("components", sa.Column("node_part", sa.Float(), nullable=False, server_default="1"))


def downgrade() -> None:
    op.drop_column("components", "node_part")
