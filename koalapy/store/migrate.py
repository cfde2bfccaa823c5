"""Bring a database to the newest revision of ``migrations/``."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine


def migrations_directory() -> Path:
    """Where the revisions are: in the wheel beside this file, in a checkout at its top."""
    inside = Path(__file__).parent / "migrations"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "migrations"


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()))
    return config


def migrate(engine: Engine, revision: str = "head") -> None:
    """Upgrade to a revision; does nothing when already there."""
    config = alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
