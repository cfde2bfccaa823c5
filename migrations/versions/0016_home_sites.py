"""The site whose users' job each counts as, to be found by; earlier jobs were of none.

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


def downgrade() -> None:
    op.drop_index("ix_jobs_home_site_id", "jobs")
    op.drop_column("jobs", "home_site")
