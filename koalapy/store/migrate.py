"""Bring a database to the newest revision of ``migrations/``."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

from koalapy.store.engine import unavailable_is_known, writing

ONE_AT_A_TIME = 0x6B6F616C61
"""Any number, as long as every daemon of this database takes the same one."""


def migrations_directory() -> Path:
    """Where the revisions are: in the wheel beside this file, in a checkout at its top."""
    inside = Path(__file__).parent / "migrations"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "migrations"


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()))
    return config


def migrate(engine: Engine, revision: str = "head") -> None:
    """Upgrade to a revision; does nothing when already there. ``StoreUnavailable`` when there is no database."""
    config = alembic_config()
    with unavailable_is_known(), writing(engine).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("select pg_advisory_xact_lock(:number)"), {"number": ONE_AT_A_TIME})
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
