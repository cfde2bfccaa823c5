"""What is left of a grid after its daemon has ended: nothing may be."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import create_engine, func, select

from koalapy.store.tables import jobs, outbox
from tests.chaos import victims
from tests.chaos.evidence import FINAL

LOOK = 0.1


def gone(look: Callable[[], list[str]], within: float) -> list[str]:
    """What is still there after so many seconds."""
    end = time.monotonic() + within
    while (found := look()) and time.monotonic() < end:
        time.sleep(LOOK)
    return found


def processes(directory: Path) -> list[str]:
    return [f"process {pid}: {command}" for pid, command in victims.everything(directory).items()]


def spools(directory: Path) -> list[str]:
    """What agents keep of components, and of files that were brought to them or are to be sent."""
    return sorted(
        str(path.relative_to(directory))
        for pattern in ("clusters/*/spool/*/*/", "clusters/*/stages/*/*", "clusters/*/lrm/local-run/*")
        for path in directory.glob(pattern)
    )


def temporary(folder: Path) -> list[str]:
    return [f"temporary {path.name}" for path in sorted(folder.iterdir())]


def rows(database: str) -> Iterator[str]:
    """What would be taken up again by a next daemon."""
    engine = create_engine(database)
    live = jobs.c.state.not_in(FINAL)
    questions = {
        "jobs that are not over": select(func.count()).select_from(jobs).where(live),
        "commands that nobody acknowledged": select(func.count()).select_from(outbox),
    }
    with engine.connect() as connection:
        for what, question in questions.items():
            if count := connection.execute(question).scalar_one():
                yield f"{count} {what} in the database"
    engine.dispose()
