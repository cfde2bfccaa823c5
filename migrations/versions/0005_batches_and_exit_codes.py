"""Which batch of a daemon was stored last, and exit codes of any size.

Revision: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

WITH_EXIT_CODES = "jobs", "attempts", "components"
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""SQLite's integers have 64 bits as they are."""


def upgrade() -> None:
    op.add_column("lease", sa.Column("batch", BIG, nullable=False, server_default="0"))
    if op.get_bind().dialect.name != "sqlite":
        for table in WITH_EXIT_CODES:
            op.alter_column(table, "exit_code", type_=sa.BigInteger())


def downgrade() -> None:
    op.drop_column("lease", "batch")
    if op.get_bind().dialect.name != "sqlite":
        for table in WITH_EXIT_CODES:
            fitting = "case when exit_code between -2147483647 and 2147483647 then exit_code else 2147483647 end"
            op.alter_column(table, "exit_code", type_=sa.Integer(), postgresql_using=fitting)
