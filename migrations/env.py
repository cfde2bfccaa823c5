"""Alembic's entry: runs the revisions on a connection handed in by ``koalapy.store.opening``."""

from alembic import context

from koalapy.store.tables import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("run migrations through koala serve")
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
