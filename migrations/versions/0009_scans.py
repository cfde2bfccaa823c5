"""How often the placement queues were scanned, by which the tries of those that wait are counted.

Revision: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("counted_scan", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "queues",
        sa.Column("priority", sa.String(length=8), nullable=False),
        sa.Column("scans", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("priority", name=op.f("pk_queues")),
    )


def downgrade() -> None:
    op.drop_table("queues")
    op.drop_column("jobs", "counted_scan")
