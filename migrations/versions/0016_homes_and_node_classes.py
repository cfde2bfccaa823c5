"""The site whose users' job each counts as, to be found by; and which of its cluster's nodes a component was placed on,
by the name of their class. Earlier ones were of none.

Revision: 0016
Revises: 0015
"""

import sqlalchemy as sa
from alembic import op

from koalapy.store.tables import Plain

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

HAS_ONE = sa.text("home_site <> ''")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("home_site", Plain(200), nullable=False, server_default=""))
    op.create_index("ix_jobs_home_site_id", "jobs", ["home_site", "id"], sqlite_where=HAS_ONE, postgresql_where=HAS_ONE)
    op.add_column("components", sa.Column("node_class", sa.String(1000), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("components", "node_class")
    op.drop_index("ix_jobs_home_site_id", "jobs")
    op.drop_column("jobs", "home_site")
