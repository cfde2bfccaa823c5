"""Find the remains of a grid after the end of its daemon."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import create_engine, func, select

from koalapy.store.tables import jobs, outbox
from tests.chaos import victims
from tests.chaos.evidence import FINAL_STATES

POLL_INTERVAL_S = 0.1


def wait_for_none(list_remains: Callable[[], list[str]], timeout_s: float) -> list[str]:
    """Return the remains once there are none, or after the timeout."""
    end = time.monotonic() + timeout_s
    while (remains := list_remains()) and time.monotonic() < end:
        time.sleep(POLL_INTERVAL_S)
    return remains


def list_processes(directory: Path) -> list[str]:
    return [f"process {pid}: {command}" for pid, command in victims.list_processes(directory).items()]


def list_spools(directory: Path) -> list[str]:
    """Return the folders of components and staged files that agents keep."""
    return sorted(
        str(path.relative_to(directory))
        for pattern in ("clusters/*/spool/*/*/", "clusters/*/stages/*/*", "clusters/*/lrm/local-run/*")
        for path in directory.glob(pattern)
    )


def list_temporary_files(folder: Path) -> list[str]:
    return [f"temporary {path.name}" for path in sorted(folder.iterdir())]


def list_rows(database: str) -> Iterator[str]:
    """Yield the counts of rows that a next daemon would resume."""
    engine = create_engine(database)
    live = jobs.c.state.not_in(FINAL_STATES)
    queries = {
        "unfinished jobs": select(func.count()).select_from(jobs).where(live),
        "unacknowledged commands": select(func.count()).select_from(outbox),
    }
    with engine.connect() as connection:
        for description, query in queries.items():
            if count := connection.execute(query).scalar_one():
                yield f"{count} {description} in the database"
    engine.dispose()
