"""Store the streams over the hub that are reserved for an attempt, and between which clusters it uses relays."""

import sqlalchemy as sa
from alembic import op

revision = "0012_streams"
down_revision = "0011_share_weights"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("streams", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("attempts", sa.Column("relayed", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("attempts", "relayed")
    op.drop_column("attempts", "streams")
