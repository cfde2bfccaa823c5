"""What nobody reads: measured links have a history of their own since 0003, and where a component's input comes from
follows from its sources.

Revision: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("links")
    op.drop_column("components", "file_site")


def downgrade() -> None:
    op.add_column("components", sa.Column("file_site", sa.String(100)))
    op.create_table(
        "links",
        sa.Column("source", sa.String(100), primary_key=True),
        sa.Column("target", sa.String(100), primary_key=True),
        sa.Column("measured_at", sa.Float, primary_key=True),
        sa.Column("latency", sa.Float),
        sa.Column("bandwidth", sa.Float),
    )
