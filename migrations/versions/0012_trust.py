"""Tokens that were asked for, who did what, and by whom a job's history came about.

Revision: 0012
Revises: 0011
"""

import hashlib

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    big_id = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.add_column("timeline", sa.Column("actor", sa.String(200), nullable=False, server_default=""))
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
    _keep_the_audit()
    # Of bundles from before nobody knows whose they are: who needs one sends it again.
    op.add_column("bundles", sa.Column("owners", sa.JSON, nullable=False, server_default="[]"))
    _give_keys_to_their_users()


def _keep_the_audit() -> None:
    """Rows are added, and neither changed nor removed: who retires old ones says so first."""
    if op.get_bind().dialect.name == "sqlite":
        for name, what in (("audit_is_kept", "delete"), ("audit_is_unchanged", "update")):
            refused = "begin select raise(abort, 'the audit is append-only'); end"
            op.execute(f"create trigger {name} before {what} on audit {refused}")
        return
    op.execute(
        "create function audit_is_append_only() returns trigger language plpgsql as "
        "$$ begin raise exception 'the audit is append-only'; end $$"
    )
    for name, what in (("audit_is_kept", "delete"), ("audit_is_unchanged", "update"), ("audit_is_there", "truncate")):
        made = f"create trigger {name} before {what} on audit for each statement"
        op.execute(f"{made} execute function audit_is_append_only()")


def _give_keys_to_their_users() -> None:
    """Each user has keys of their own: what one was used for is found by both, of which a hash is kept."""
    connection = op.get_bind()
    used = sa.text("select submissions.key, jobs.owner from submissions join jobs on jobs.id = submissions.job_id")
    keys = [{"key": key, "own": _key_of(owner, key)} for key, owner in connection.execute(used)]
    if keys:
        connection.execute(sa.text("update submissions set key = :own where key = :key"), keys)


def _key_of(user: str, key: str) -> str:
    return hashlib.sha256(f"{user}\n{key}".encode(errors="surrogatepass")).hexdigest()


def downgrade() -> None:
    op.drop_column("bundles", "owners")
    op.drop_table("audit")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("drop function audit_is_append_only")
    op.drop_table("tokens")
    op.drop_column("timeline", "actor")
