"""The replica catalogue, staging, results, measured links, and the advisor's record.

Revision: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _columns() -> dict[str, list[sa.Column]]:
    return {
        "jobs": [sa.Column("application", sa.String(length=200), nullable=False, server_default="")],
        "components": [
            sa.Column("sources", sa.JSON(), nullable=False, server_default="[]"),
            sa.Column("staging_since", sa.Float(), nullable=True),
            sa.Column("stage_size", sa.BigInteger(), nullable=False, server_default="0"),
            sa.Column("staged", sa.BigInteger(), nullable=False, server_default="0"),
            sa.Column("staged_at", sa.Float(), nullable=True),
        ],
    }


def _job(table: str, *rest: str) -> list[sa.Column]:
    keys = [sa.Column(name, sa.Integer(), nullable=False) for name in rest]
    return [
        sa.Column("job_id", BigId, nullable=False),
        *keys,
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f(f"fk_{table}_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", *rest, name=op.f(f"pk_{table}")),
    ]


def upgrade() -> None:
    for table, columns in _columns().items():
        for column in columns:
            op.add_column(table, column)
    op.create_index(op.f("ix_jobs_application_id"), "jobs", ["application", "id"])
    op.create_table(
        "replicas",
        sa.Column("name", sa.String(length=1000), nullable=False),
        sa.Column("cluster", sa.String(length=100), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.String(length=64), nullable=False),
        sa.Column("parts", sa.JSON(), nullable=True),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("added_at", sa.Float(), nullable=False),
        sa.Column("verified_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", "cluster", name=op.f("pk_replicas")),
    )
    op.create_table(
        "bundles",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bundles")),
    )
    op.create_table(
        "results",
        *_job("results", "generation", "rank"),
        sa.Column("cluster", sa.String(length=100), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
    )
    op.create_table(
        "measurements",
        sa.Column("id", BigId, nullable=False),
        sa.Column("one", sa.String(length=100), nullable=False),
        sa.Column("other", sa.String(length=100), nullable=False),
        sa.Column("kind", sa.String(length=12), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("latency", sa.Float(), nullable=True),
        sa.Column("bandwidth", sa.Float(), nullable=True),
        sa.Column("job_id", BigId, nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurements")),
    )
    op.create_index(op.f("ix_measurements_one_other_at"), "measurements", ["one", "other", "at"])
    op.create_table(
        "advice",
        *_job("advice", "generation"),
        sa.Column("application", sa.String(length=200), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("clusters", sa.Integer(), nullable=False),
        sa.Column("predicted", sa.Float(), nullable=True),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actual", sa.Float(), nullable=True),
    )
    op.create_index(op.f("ix_advice_application_at"), "advice", ["application", "at"])


def downgrade() -> None:
    for table in ("advice", "measurements", "results", "bundles", "replicas"):
        op.drop_table(table)
    op.drop_index(op.f("ix_jobs_application_id"), "jobs")
    for table, columns in _columns().items():
        for column in columns:
            op.drop_column(table, column.name)
