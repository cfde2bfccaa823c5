"""What earlier jobs ran, so that the advisor learns from them too: the column was empty for them.

Revision: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

from koalapy.model.application import application_of
from koalapy.store.rows import spec_from_json
from koalapy.store.tables import Plain

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

AT_ONCE = 1000
"""Jobs that are in memory at the same time."""

jobs = sa.table(
    "jobs", sa.column("id", sa.BigInteger), sa.column("spec", sa.JSON), sa.column("application", Plain(200))
)


def upgrade() -> None:
    connection = op.get_bind()
    update = sa.update(jobs).where(jobs.c.id == sa.bindparam("job")).values(application=sa.bindparam("known_as"))
    query = sa.select(jobs.c.id, jobs.c.spec).where(jobs.c.application == "").order_by(jobs.c.id).limit(AT_ONCE)
    last = 0
    while found := connection.execute(query.where(jobs.c.id > last)).all():
        last = found[-1].id
        named = [{"job": job, "known_as": name} for job, spec in found if (name := _application(spec))]
        if named:
            connection.execute(update, named)


def _application(spec: dict[str, object]) -> str:
    try:
        return application_of(spec_from_json(spec))
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""  # a job that no version can read any more


def downgrade() -> None:
    """A name that is there does no harm."""
