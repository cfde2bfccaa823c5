"""Store the drains of a cluster as they are, with begin and end, and those that are planned."""

import sqlalchemy as sa
from alembic import op

revision = "0008_planned_drains"
down_revision = "0007_shared_nodes"

clusters = sa.table(
    "clusters",
    sa.column("name", sa.String),
    sa.column("drained", sa.JSON),
    sa.column("drained_at", sa.Float),
    sa.column("drained_by", sa.String),
    sa.column("drained_reason", sa.String),
)


def upgrade() -> None:
    op.add_column("clusters", sa.Column("drained", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("clusters", sa.Column("planned_drains", sa.JSON(), nullable=False, server_default="[]"))
    columns = clusters.c.name, clusters.c.drained_at, clusters.c.drained_by, clusters.c.drained_reason
    rows = op.get_bind().execute(sa.select(*columns).where(clusters.c.drained_at.is_not(None))).all()
    for name, at, by, reason in rows:
        drain = {"at": at, "by": by or "", "reason": reason or ""}
        op.execute(clusters.update().where(clusters.c.name == name).values(drained=drain))
    for column in ("drained_at", "drained_by", "drained_reason"):
        op.drop_column("clusters", column)


def downgrade() -> None:
    for column in (sa.Column("drained_at", sa.Float()), sa.Column("drained_by", sa.String(200))):
        op.add_column("clusters", column)
    op.add_column("clusters", sa.Column("drained_reason", sa.Text()))
    rows = op.get_bind().execute(sa.select(clusters.c.name, clusters.c.drained)).all()
    for name, drain in ((name, drain) for name, drain in rows if drain):
        values = {"drained_at": drain["at"], "drained_by": drain["by"], "drained_reason": drain["reason"]}
        op.execute(clusters.update().where(clusters.c.name == name).values(**values))
    op.drop_column("clusters", "planned_drains")
    op.drop_column("clusters", "drained")
