"""Drop the stored predictions, whose accuracy is not measured any more."""

import sqlalchemy as sa
from alembic import op

revision = "0002_no_predictions"
down_revision = "0001_schema"


def upgrade() -> None:
    op.drop_table("predictions")


def downgrade() -> None:
    op.create_table(
        "predictions",
        sa.Column("job_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("kind", sa.String(12), nullable=False),
        sa.Column("made_at", sa.Float(), nullable=False),
        sa.Column("source", sa.String(12), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("low", sa.Float(), nullable=False),
        sa.Column("middle", sa.Float(), nullable=False),
        sa.Column("high", sa.Float(), nullable=False),
        sa.Column("conditions", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_predictions_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "kind", "made_at", name="pk_predictions"),
    )
    op.create_index("ix_predictions_made_at", "predictions", ["made_at"])
