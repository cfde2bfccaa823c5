"""Store the weights in fair share that operators have set."""

import sqlalchemy as sa
from alembic import op

revision = "0011_share_weights"
down_revision = "0010_use_sums"


def upgrade() -> None:
    op.create_table(
        "share_weights",
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("weight", sa.Float()),
        sa.Column("by", sa.String(200), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("user", name="pk_share_weights"),
    )


def downgrade() -> None:
    op.drop_table("share_weights")
