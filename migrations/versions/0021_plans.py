"""The plan of an attempt is stored once, not in each command that opens a barrier.

Revision: 0021
Revises: 0020
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "plans",
        sa.Column("job_id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False, autoincrement=False),
        sa.Column("generation", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "generation", name="pk_plans"),
    )


def downgrade() -> None:
    # An earlier version knows no command without its plan; the barrier does not open, and the job is tried again.
    op.execute("delete from outbox where cast(payload as text) like '%\"plan\":%'")
    op.drop_table("plans")
