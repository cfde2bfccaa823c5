"""Tokens that were asked for, in SQL: their digests, never themselves."""

from collections.abc import Collection, Sequence
from dataclasses import asdict

from sqlalchemy import delete, select

from koalapy.ports import StoredToken
from koalapy.store.database import Database, chunks, upsert
from koalapy.store.tables import tokens as table


class SqlTokens:
    """The ``TokenStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tokens(self) -> list[StoredToken]:
        return [StoredToken(**row) for row in self._database.rows(select(table).order_by(table.c.id))]

    def save_tokens(self, tokens: Sequence[StoredToken]) -> None:
        with self._database.writing() as connection:
            upsert(connection, table, [asdict(token) for token in tokens])

    def remove_tokens(self, tokens: Collection[int]) -> None:
        with self._database.writing() as connection:
            for some in chunks(tokens):
                connection.execute(delete(table).where(table.c.id.in_(some)))
