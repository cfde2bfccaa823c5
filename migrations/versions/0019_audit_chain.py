"""Each row of the audit has a hash of itself and all before it, and none can be replaced.

Revision: 0019
Revises: 0018
"""

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

COLUMNS = ("at", "actor", "role", "how", "address", "action", "target", "outcome", "detail", "times", "id")
"""In the order in which they are hashed."""
ROWS_AT_ONCE = 10_000


def upgrade() -> None:
    big_id = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.add_column("audit", sa.Column("hash", sa.String(64), nullable=False, server_default=""))
    op.create_table(
        "audit_chain",
        sa.Column("one", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("head_id", big_id, nullable=False),
        sa.Column("head_hash", sa.String(64), nullable=False),
        sa.Column("removed_id", big_id, nullable=False),
        sa.Column("removed_hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("one", name="pk_audit_chain"),
    )
    connection = op.get_bind()
    is_sqlite = connection.dialect.name == "sqlite"
    if is_sqlite:
        unchanged = "create trigger audit_is_unchanged before update on audit begin"
        op.execute("drop trigger audit_is_unchanged")
    else:
        op.execute("alter table audit disable trigger audit_is_unchanged")
    head_id, head_hash = _chain_rows(connection)
    if is_sqlite:
        op.execute(f"{unchanged} select raise(abort, 'the audit is append-only'); end")
        # REPLACE removes a row without the trigger of a removal; this one comes before it.
        op.execute(
            "create trigger audit_is_not_replaced before insert on audit "
            "when exists (select 1 from audit where id = cast(new.id as integer)) "
            "begin select raise(abort, 'the audit is append-only'); end"
        )
    else:
        op.execute("alter table audit enable trigger audit_is_unchanged")
    insert = sa.text("insert into audit_chain values (1, :id, :hash, 0, '')")
    connection.execute(insert, {"id": head_id, "hash": head_hash})


def _chain_rows(connection: sa.Connection) -> tuple[int, str]:
    """Give the rows that there are their hashes; return the last row and its hash."""
    last, hashed = 0, ""
    query = sa.text(f"select {', '.join(COLUMNS)} from audit where id > :last order by id limit {ROWS_AT_ONCE}")
    update = sa.text("update audit set hash = :hash where id = :id")
    while rows := connection.execute(query, {"last": last}).all():
        hashes = []
        for row in rows:
            text = json.dumps([hashed, *row], separators=(",", ":"))
            hashed, last = hashlib.sha256(text.encode()).hexdigest(), row.id
            hashes.append({"id": row.id, "hash": hashed})
        connection.execute(update, hashes)
    return last, hashed


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute("drop trigger audit_is_not_replaced")
    op.drop_table("audit_chain")
    op.drop_column("audit", "hash")
