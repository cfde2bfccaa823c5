"""Detect that an SQLite database was removed or replaced while this process has it open.

SQLite reports no error then, and the data that it writes is lost when the process ends.
"""

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine

from koalapy.model.errors import StoreUnavailable

RESTART_HINT = "stop the daemon, put the newest copy back (koala restore), and start the daemon"
MIN_SIZE = 512
"""Bytes that a database with a table has at least."""


class OpenFiles:
    """The database and its write-ahead log, by device and inode.

    A connection is kept open, so that SQLite itself never removes the log and makes another one.
    """

    def __init__(self, database: Path) -> None:
        self._anchor = sqlite3.connect(database, check_same_thread=False)
        with closing(self._anchor.execute("SELECT count(*) FROM sqlite_master")) as cursor:
            cursor.fetchone()
        files = (database.absolute(), Path(f"{database.absolute()}-wal"))
        self._identities: Mapping[Path, tuple[int, int]] = {
            path: (found.st_dev, found.st_ino) for path in files if (found := _stat(path)) is not None
        }

    def check(self) -> None:
        """Raise ``StoreUnavailable`` if a file is not the one that was opened, or was cut off."""
        for path, identity in self._identities.items():
            found = _stat(path)
            if found is None:
                raise StoreUnavailable(f"{path} was removed while the daemon uses it", hint=RESTART_HINT)
            if (found.st_dev, found.st_ino) != identity:
                raise StoreUnavailable(f"{path} was replaced while the daemon uses it", hint=RESTART_HINT)
            if not path.name.endswith("-wal") and found.st_size < MIN_SIZE:
                raise StoreUnavailable(f"{path} was truncated while the daemon uses it", hint=RESTART_HINT)

    def close(self) -> None:
        self._anchor.close()


def open_files_of(engine: Engine) -> OpenFiles | None:
    """Return the files of a database; None of one that is in memory, or on a server."""
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return OpenFiles(Path(name))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
