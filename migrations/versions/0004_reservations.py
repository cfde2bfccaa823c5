"""Store advance reservations of nodes."""

import sqlalchemy as sa
from alembic import op

revision = "0004_reservations"
down_revision = "0003_planned_starts"


def upgrade() -> None:
    op.create_table(
        "reservations",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("site_name", sa.String(100), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("begins_at", sa.Float(), nullable=False),
        sa.Column("ends_at", sa.Float(), nullable=False),
        sa.Column("parts", sa.JSON(), nullable=False),
        sa.Column("made_at", sa.Float(), nullable=False),
        sa.Column("users", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "state in ('making', 'made', 'failed', 'cancelled', 'broken', 'over')", name="ck_reservations_state"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_reservations"),
    )


def downgrade() -> None:
    op.drop_table("reservations")
