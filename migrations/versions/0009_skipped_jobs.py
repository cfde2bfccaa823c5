"""Store which job numbers no job of the database had, so that lost jobs differ from those that were removed."""

import sqlalchemy as sa
from alembic import op

revision = "0009_skipped_jobs"
down_revision = "0008_planned_drains"

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "skipped_jobs",
        sa.Column("first", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("last", BIG_ID, nullable=False),
        sa.PrimaryKeyConstraint("first", name="pk_skipped_jobs"),
    )


def downgrade() -> None:
    op.drop_table("skipped_jobs")
