"""What was foretold of jobs, to be held against what comes.

Revision: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "predictions",
        sa.Column(
            "job_id",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("jobs.id", ondelete="CASCADE", name="fk_predictions_job_id"),
            nullable=False,
        ),
        sa.Column("kind", sa.String(12), nullable=False),
        sa.Column("made_at", sa.Float, nullable=False),
        sa.Column("source", sa.String(12), nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("low", sa.Float, nullable=False),
        sa.Column("middle", sa.Float, nullable=False),
        sa.Column("high", sa.Float, nullable=False),
        sa.Column("conditions", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "kind", "made_at", name="pk_predictions"),
    )
    op.create_index("ix_predictions_made_at", "predictions", ["made_at"])


def downgrade() -> None:
    op.drop_table("predictions")
