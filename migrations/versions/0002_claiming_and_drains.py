"""What incremental claiming, re-placed components, probation and drains need to be kept.

Revision: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ENDING = ("jobs", "components")


def _columns() -> dict[str, list[sa.Column]]:
    return {
        "jobs": [
            sa.Column("claim_factor", sa.Float(), nullable=True),
            sa.Column("first_start_estimate", sa.Float(), nullable=True),
        ],
        "attempts": [
            sa.Column("start_estimate", sa.Float(), nullable=True),
            sa.Column("claim_at", sa.Float(), nullable=True),
        ],
        "components": [
            sa.Column("submitted_at", sa.Float(), nullable=True),
            sa.Column("file_site", sa.String(length=100), nullable=True),
            sa.Column("transfer_time", sa.Float(), nullable=False, server_default="0"),
            sa.Column("replaces", sa.Integer(), nullable=True),
            sa.Column("superseded", sa.Boolean(), nullable=False, server_default=sa.false()),
        ],
        "clusters": [
            sa.Column("note", sa.Text(), nullable=False, server_default=""),
            sa.Column("trials", sa.Integer(), nullable=False, server_default="0"),
            sa.Column("drained_at", sa.Float(), nullable=True),
            sa.Column("drained_by", sa.String(length=200), nullable=True),
            sa.Column("drained_reason", sa.Text(), nullable=True),
        ],
    }


# Columns are added and dropped in place: a batch would make the table anew, and with SQLite's foreign keys on, dropping
# the old jobs would take their attempts and timelines with them.


def upgrade() -> None:
    for table, columns in _columns().items():
        for column in columns:
            op.add_column(table, column)
    for table in ENDING:
        op.create_index(op.f(f"ix_{table}_ended_at"), table, ["ended_at"])
    op.execute("update clusters set note = reason where unusable")


def downgrade() -> None:
    for table in ENDING:
        op.drop_index(op.f(f"ix_{table}_ended_at"), table)
    for table, columns in _columns().items():
        for column in columns:
            op.drop_column(table, column.name)
