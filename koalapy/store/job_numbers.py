"""Record used job numbers and the last commit in files outside the database.

A database that was restored from a copy, or whose write-ahead log was lost, does not know the latest numbers and
changes. With these files no number is used twice, and operators get an alert.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from koalapy.model.alert import Alert, AlertKind, Severity
from koalapy.model.errors import StoreUnavailable
from koalapy.model.job import JobId
from koalapy.runner.folders import sync_folder
from koalapy.system.files import open_owner_only
from koalapy.system.process import read_boot_id

log = structlog.get_logger()

NUMBERS_FILE, COMMIT_FILE, LOSS_FILE = "job-numbers", "last-commit", "lost-changes"
"""File names in the data directory."""
LOSS_ALERT_S = 7 * 86400.0
"""Time for which an alert reports changes that the database has lost."""
Commit = tuple[int, int]
"""The number of a daemon run (epoch), and that of a transaction in it."""
BLOCK = 1000
"""Numbers that are reserved on the disk at once."""
UNKNOWN_PAST = 10_000_000
"""Numbers that are skipped if a database with jobs has no such file, as on a new machine."""
_RECORD = re.compile(rb"(\d{20}) (\d{20}) ([0-9a-f-]{36})\n", re.ASCII)
_COMMIT = re.compile(rb"(\d{20}) (\d{20})\n", re.ASCII)
COMMIT_SIZE = 42
"""Bytes of a recorded commit."""
_FOLDER = re.compile(r"[1-9]\d{0,17}", re.ASCII)


class JobNumbers:
    """The highest used number and the end of the reserved block.

    Each number is written before its job is stored, so killing the daemon loses none. Only new blocks are synced to the
    disk; after a failure of the machine, numbering continues after the block.
    """

    def __init__(self, path: Path, folders: Sequence[Path] = (), boot: str | None = None) -> None:
        """``folders`` contain an entry per job, named by its number; ``boot`` identifies the current boot of the
        machine."""
        self._path, self._folders = path, folders
        self._commits = -1
        self.alerts: list[Alert] = []
        """Problems of these files or of the database, as operators see them."""
        self._boot = boot or read_boot_id() or "0" * 36
        self._file = -1
        self._given = self._reserved = 0

    def last_given(self, stored: JobId) -> JobId:
        """Return the highest number that may be in use. ``stored`` is the highest in the database.

        Raise ``StoreUnavailable`` if the file cannot be read.
        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise _unusable_error(self._path, error) from error
        if match := _RECORD.fullmatch(content):
            reserved, used = int(match[1]), int(match[2])
            last = used if match[3].decode() == self._boot else max(reserved, used)
        else:
            last = stored + UNKNOWN_PAST if stored else 0
        self._given = max(stored, last, *(_highest_in_folder(folder) for folder in self._folders), 0)
        if not match and (content or stored):
            self._report_unknown_numbers(is_missing=not content)
        return self._given

    def _report_unknown_numbers(self, *, is_missing: bool) -> None:
        """Tell operators why the next job gets a high number."""
        cause = f"{self._path} {'is missing' if is_missing else 'has no readable number'}"
        summary = f"jobs are numbered from {self._given + 1} on, above all numbers that may have been used"
        remedy = f"nothing is lost; next time restore {self._path.name} together with the database"
        log.warning(summary, action="job-numbers-unknown", file=str(self._path), cause=cause, next=self._given + 1)
        target = "job numbers"
        self.alerts.append(Alert(AlertKind.DATABASE, Severity.WARNING, target, summary, cause, remedy, time.time()))

    def find_lost_changes(self, stored: Commit, stored_job: JobId) -> None:
        """Compare the database with what the previous daemon committed; report missing changes to operators.

        ``stored``: the last commit in the database. ``stored_job``: its highest job number.
        """
        path = self._path.with_name(LOSS_FILE)
        loss: dict[str, Any] | None = None
        committed = recorded_commit(self._path.parent)
        highest = max((_highest_in_folder(folder) for folder in self._folders), default=0)
        if stored < committed or stored_job < highest:
            cause = "the database lacks changes that it had acknowledged"
            if stored < committed:
                cause += f": it ends at change {stored[0]}.{stored[1]}, not at {committed[0]}.{committed[1]}"
            last = max(highest, recorded_numbers(self._path, used_only=True))
            if last > stored_job:
                names = f"job {last}" if last == stored_job + 1 else f"jobs {stored_job + 1} to {last}"
                cause += f"; {names} may be missing"
            log.critical("the database lacks changes", action="database-lacks-changes", cause=cause)
            loss = {"at": time.time(), "cause": cause}
            with suppress(OSError):
                descriptor = open_owner_only(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                with os.fdopen(descriptor, "w") as file:
                    json.dump(loss, file)
        else:
            with suppress(OSError, ValueError, KeyError, TypeError):
                content = json.loads(path.read_bytes())
                loss = {"at": float(content["at"]), "cause": str(content["cause"])}
        if loss is not None and time.time() < loss["at"] + LOSS_ALERT_S:
            summary = "the database has lost changes: jobs are missing, or are not in their last state"
            remedy = f"find out what damaged the files of the database; submit missing jobs again; then remove {path}"
            alert = Alert(
                AlertKind.DATABASE, Severity.CRITICAL, "lost changes", summary, loss["cause"], remedy, loss["at"]
            )
            self.alerts.append(alert)

    def note_commit(self, commit: Commit) -> None:
        """Record a commit after it is stored. A failure of the machine may lose it, which causes no alert.

        The first one is synced, so that standby daemons see it on a shared file system.
        """
        with suppress(OSError):
            if is_first := self._commits < 0:
                self._commits = open_owner_only(str(self._path.with_name(COMMIT_FILE)), os.O_RDWR | os.O_CREAT)
            match = _COMMIT.fullmatch(os.pread(self._commits, COMMIT_SIZE, 0))
            if match and int(match[1]) > commit[0]:
                return  # another daemon has taken over since this one's commit
            os.pwrite(self._commits, b"%020d %020d\n" % commit, 0)
            if is_first:
                os.fsync(self._commits)

    def give(self, job: JobId) -> None:
        """Record that a number is used. Raise ``StoreUnavailable`` if the file cannot be written."""
        if job <= self._given and self._file >= 0:
            return
        try:
            self._open_file()
            given = max(self._given, job)
            is_new_block = given > self._reserved
            reserved = given + BLOCK if is_new_block else self._reserved
            self._write_numbers(reserved, given, sync=is_new_block)
            self._reserved, self._given = reserved, given
        except OSError as error:
            raise _unusable_error(self._path, error) from error

    def close(self) -> None:
        """Release the rest of the reserved block, so that numbering continues without a gap."""
        if self._commits >= 0:
            os.close(self._commits)
            self._commits = -1
        if self._file >= 0:
            is_latest = recorded_numbers(self._path) <= self._reserved  # else another daemon has taken over
            self._reserved = self._given
            with suppress(OSError):  # if that fails, the reserved block remains valid
                if is_latest:
                    self._write_numbers(self._reserved, self._given, sync=True)
            os.close(self._file)
            self._file = -1

    def _open_file(self) -> None:
        if self._file >= 0 and not os.fstat(self._file).st_nlink:
            os.close(self._file)
            self._file, self._reserved = -1, 0
        if self._file < 0:
            self._file = open_owner_only(str(self._path), os.O_RDWR | os.O_CREAT)
            sync_folder(self._path.parent)

    def _write_numbers(self, reserved: JobId, given: JobId, *, sync: bool) -> None:
        os.pwrite(self._file, b"%020d %020d %s\n" % (reserved, given, self._boot.encode()), 0)
        if sync:
            os.fsync(self._file)


def recorded_commit(folder: Path) -> Commit:
    """Return the last commit that a daemon recorded in its data directory; zeros without one."""
    try:
        match = _COMMIT.fullmatch((folder / COMMIT_FILE).read_bytes())
    except OSError:
        match = None
    return (int(match[1]), int(match[2])) if match else (0, 0)


def recorded_numbers(path: Path, *, used_only: bool = False) -> JobId:
    """Return the highest number in a file, used or reserved; 0 if the file has none."""
    try:
        match = _RECORD.fullmatch(path.read_bytes())
    except OSError:
        return 0
    return max(0 if used_only else int(match[1]), int(match[2])) if match else 0


def _unusable_error(path: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"{path} cannot be used: {error.strerror or error}", hint="make room or mend the disk")


def _highest_in_folder(folder: Path) -> JobId:
    try:
        return max((int(name) for name in os.listdir(folder) if _FOLDER.fullmatch(name)), default=0)
    except OSError:
        return 0
