"""Record used job numbers in a file outside the database.

A database that was restored from a copy does not know the latest numbers. With this file, no number is used twice.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from koalapy.model.errors import StoreUnavailable
from koalapy.model.job import JobId
from koalapy.system.files import open_owner_only

NUMBERS_FILE = "job-numbers"
"""File name in the data directory."""
BLOCK = 1000
"""Numbers that are reserved on the disk at once."""
UNKNOWN_PAST = 10_000_000
"""Numbers that are skipped if a database with jobs has no such file, as on a new machine."""
_RECORD = re.compile(rb"(\d{20}) (\d{20}) ([0-9a-f-]{36})\n", re.ASCII)
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
        self._boot = boot or _boot_id()
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
        return self._given

    def give(self, job: JobId) -> None:
        """Record that a number is used. Raise ``StoreUnavailable`` if the file cannot be written."""
        if job <= self._given and self._file >= 0:
            return
        try:
            self._open_file()
            self._given = max(self._given, job)
            is_new_block = self._given > self._reserved
            if is_new_block:
                self._reserved = self._given + BLOCK
            self._write_numbers(sync=is_new_block)
        except OSError as error:
            raise _unusable_error(self._path, error) from error

    def close(self) -> None:
        """Release the rest of the reserved block, so that numbering continues without a gap."""
        if self._file >= 0:
            self._reserved = self._given
            with suppress(OSError):  # if that fails, the reserved block remains valid
                self._write_numbers(sync=True)
            os.close(self._file)
            self._file = -1

    def _open_file(self) -> None:
        if self._file >= 0 and not os.fstat(self._file).st_nlink:
            os.close(self._file)
            self._file, self._reserved = -1, 0
        if self._file < 0:
            self._file = open_owner_only(str(self._path), os.O_RDWR | os.O_CREAT)

    def _write_numbers(self, *, sync: bool) -> None:
        os.pwrite(self._file, b"%020d %020d %s\n" % (self._reserved, self._given, self._boot.encode()), 0)
        if sync:
            os.fsync(self._file)


def recorded_numbers(path: Path) -> JobId:
    """Return the highest number in a file, used or reserved; 0 if the file has none."""
    try:
        match = _RECORD.fullmatch(path.read_bytes())
    except OSError:
        return 0
    return max(int(match[1]), int(match[2])) if match else 0


def _unusable_error(path: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"{path} cannot be used: {error.strerror or error}", hint="make room or mend the disk")


def _highest_in_folder(folder: Path) -> JobId:
    try:
        return max((int(name) for name in os.listdir(folder) if _FOLDER.fullmatch(name)), default=0)
    except OSError:
        return 0


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "0" * 36
