"""``koala backup`` and ``koala restore``: a daemon's data as a folder that no other account may read."""

import time
from pathlib import Path
from typing import Annotated

from koalapy.cli.daemon.processes import DATA, AgentConfig
from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.client.errors import printable

DataDir = Annotated[Path, Option("--data-dir", envvar="KOALA_DATA_DIR", help="the daemon's data")]


def backup(
    directory: Annotated[Path, Argument(help="a new folder, or an empty one")],
    data_dir: DataDir = DATA,
    config: AgentConfig = None,
    files_only: Annotated[
        bool, Option("--files-only", help="leave the database out: PostgreSQL has its own dumps")
    ] = False,
) -> None:
    """Copy a daemon's database, files and configuration into a folder, also while it runs: koala backup DIR

    The folder is for this account alone: tokens are in it. koala restore DIR puts it back.
    """
    from koalapy.daemon.backup import make_backup

    made = make_backup(directory, data_dir.expanduser(), config, files_only=files_only)
    database = f"database of {made.database_size:,} bytes" if made.database == "sqlite" else "no database"
    configuration = made.configuration or "no configuration"
    files = f"{made.files} files of {made.files_size:,} bytes"
    print(printable(f"backup in {directory}: {database}, {files}, {configuration}"))


def restore(
    directory: Annotated[Path, Argument(help="a folder that koala backup has made")],
    data_dir: DataDir = DATA,
    config: AgentConfig = None,
    replace: Annotated[bool, Option("--replace", help="also where data is; it is kept in a folder beside")] = False,
) -> None:
    """Put a backup back where a daemon's data belongs, while no daemon runs there: koala restore DIR

    Tokens that were revoked since the backup hold again: koala token revoke --all ends every one.
    """
    from koalapy.daemon.backup import restore_backup

    where = data_dir.expanduser()
    made, displaced = restore_backup(directory, where, config, replace=replace)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made.made_at))
    print(printable(f"restored {made.files} files of {at} to {where}"))
    if made.database != "sqlite":
        print("the database is not in the backup: put its dump back with pg_restore before the daemon starts")
    if displaced is not None:
        print(printable(f"what was there is in {displaced}: remove it when it is not needed any more"))
    if made.configuration:
        print(printable(f"the configuration of that day is {directory / 'koala.yaml'}"))
