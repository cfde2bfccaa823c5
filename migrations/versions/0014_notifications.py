"""What users and operators are to be told, until they are.

Revision: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    big_id = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "notifications",
        sa.Column("id", big_id, nullable=False, autoincrement=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("channel", sa.String(12), nullable=False),
        sa.Column("to", sa.Text, nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("next_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_notifications"),
    )


def downgrade() -> None:
    op.drop_table("notifications")
