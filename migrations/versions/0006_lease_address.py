"""Store where the holder of the lease serves."""

import sqlalchemy as sa
from alembic import op

revision = "0006_lease_address"
down_revision = "0005_reservation_changes"


def upgrade() -> None:
    op.add_column("lease", sa.Column("address", sa.String(300), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("lease", "address")
