"""Tokens that were asked for, who did what, and by whom a job's history came about.

Revision: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    big_id = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.add_column("timeline", sa.Column("actor", sa.String(200), nullable=False, server_default=""))
    op.add_column("bundles", sa.Column("owner", sa.String(200), nullable=False, server_default=""))
    op.create_table(
        "tokens",
        sa.Column("id", big_id, nullable=False, autoincrement=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("role", sa.String(12), nullable=False),
        sa.Column("how", sa.String(300), nullable=False),
        sa.Column("note", sa.String(300), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("last_used_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
        sa.Column("made_by", big_id),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("digest", name="uq_tokens_digest"),
    )
    op.create_table(
        "audit",
        sa.Column("id", big_id, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("role", sa.String(12), nullable=False),
        sa.Column("how", sa.String(300), nullable=False),
        sa.Column("address", sa.String(100), nullable=False),
        sa.Column("action", sa.String(60), nullable=False),
        sa.Column("target", sa.String(300), nullable=False),
        sa.Column("outcome", sa.String(20), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("times", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_actor_at", "audit", ["actor", "at"])


def downgrade() -> None:
    op.drop_table("audit")
    op.drop_table("tokens")
    op.drop_column("bundles", "owner")
    op.drop_column("timeline", "actor")
