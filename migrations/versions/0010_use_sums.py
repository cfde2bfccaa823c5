"""Store sums of samples by slots of several lengths, of all clusters and of each, in place of single samples."""

import sqlalchemy as sa
from alembic import op

revision = "0010_use_sums"
down_revision = "0009_skipped_jobs"

COUNTS = "samples", "ours", "local", "idle", "down", "withheld", "unknown", "queued", "started", "ended"


def upgrade() -> None:
    op.create_table(
        "use_sums",
        sa.Column("length", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        sa.Column("startup", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("length", "start", "cluster", name="pk_use_sums"),
    )
    for length in (60, 600, 3600):
        op.execute(
            f"INSERT INTO use_sums SELECT {length}, CAST(at AS BIGINT) / {length} * {length}, '', count(*), sum(ours), "
            "sum(local), sum(idle), 0, 0, 0, sum(queued), sum(started), sum(ended), "
            "sum(COALESCE(startup, 0) * started) FROM samples GROUP BY 2"
        )
    op.drop_table("samples")
    op.drop_table("local_load")


def downgrade() -> None:
    counts = "ours", "local", "idle", "queued", "started", "ended"
    op.create_table(
        "samples",
        sa.Column("at", sa.Float(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.Integer(), nullable=False) for name in counts),
        sa.Column("startup", sa.Float()),
        sa.PrimaryKeyConstraint("at", name="pk_samples"),
    )
    op.create_table(
        "local_load",
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("local", sa.Float(), nullable=False),
        sa.Column("total", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("slot", "cluster", name="pk_local_load"),
    )
    op.drop_table("use_sums")
