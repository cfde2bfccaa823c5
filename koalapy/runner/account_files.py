"""Access to the folders of one account's jobs, for an agent that serves several accounts. It runs as that account only.

``account_files.py BASE ACCOUNT VERB [NAME]``: the folders are in ``BASE/ACCOUNT``, which is private to the account.
The input is a tar archive on standard input. The output is a sequence of frames on standard output: a line of JSON,
then the bytes of the file. So an agent never opens files in a folder that another account can write.

put NAME      create the folder if it is missing, and unpack standard input into it
get NAME      write the files that runners left in it: results, unsent output and the end of their log
collect NAME  write the files in it that a job collects
remove NAME   remove the folder
list          write the names of all folders of the account
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import stat
import sys
import tarfile

if not __package__:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from koalapy.runner.folders import remove_path
from koalapy.runner.result_archive import FoldersTooDeep, Patterns, open_regular, write_archive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any, BinaryIO

NAME = re.compile(r"(work|stage)-[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}", re.ASCII)
ACCOUNT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
RUNNER_LOG = "runner.log"
LEFT = re.compile(r"(result)\.\d{1,7}\.json|(output)\.\d{1,7}\.\d{1,18}", re.ASCII)
MAX_RESULT = 256 * 1024
"""Maximum size of a result in bytes. Larger ones are ignored."""
LOG_END = 4096
"""Bytes that are sent from the end of the log."""
CHUNK = 1 << 20


class Refused(Exception):
    """A rejected operation, with a message for users."""


class Frames:
    """A writer of files as frames for an agent."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target

    def addfile(self, tarinfo: tarfile.TarInfo, fileobj: IO[bytes] | None = None) -> None:
        """Write a frame. The signature is that of ``tarfile.TarFile.addfile``."""
        header = {"name": tarinfo.name, "size": tarinfo.size, "mode": tarinfo.mode, "mtime": int(tarinfo.mtime)}
        self.add(header, fileobj or io.BytesIO())

    def add(self, header: dict[str, Any], file: IO[bytes]) -> None:
        """Write a frame: the header as JSON, then ``size`` bytes of the file. Raise ``Refused`` if it has fewer."""
        self._target.write(json.dumps(header).encode() + b"\n")
        remaining = header["size"]
        while remaining:
            data = file.read(min(CHUNK, remaining))
            if not data:
                raise Refused(f"{header['name']!r} was cut while it was read")
            self._target.write(data)
            remaining -= len(data)


class Folders:
    """All job folders of one account, in a private folder."""

    def __init__(self, base: str, account: str) -> None:
        if not os.path.isabs(base) or not ACCOUNT.fullmatch(account):
            raise Refused(f"{base!r} is not an absolute path, or {account!r} is not an account name")
        self._own = os.path.join(base, account)
        os.umask(0o077)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._own, 0o700)
        status = os.lstat(self._own)
        if not stat.S_ISDIR(status.st_mode):
            raise Refused(f"{self._own} is not a folder")
        if status.st_uid != os.geteuid():
            raise Refused(f"{self._own} belongs to another account (uid {status.st_uid})")
        if status.st_mode & 0o077:
            os.chmod(self._own, 0o700)

    def path(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise Refused(f"{name!r} is not the name of a job folder")
        return os.path.join(self._own, name)

    def put(self, name: str, source: BinaryIO) -> None:
        """Unpack a tar archive into a job's folder, created if missing. Raise ``Refused`` for unsafe entries."""
        folder = self.path(name)
        if os.path.islink(folder):
            os.unlink(folder)
        os.makedirs(folder, 0o700, exist_ok=True)
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for member in archive:
                _extract_member(archive, member, folder)

    def get(self, name: str, options: dict[str, Any], target: BinaryIO) -> None:
        """Write as frames what runners left in a job's folder: results, unsent output and the end of their log.

        ``options``: the job's number of ``nodes``, and the maximum bytes of output as ``limit``. Omit larger files.
        """
        nodes, remaining = int(options["nodes"]), int(options["limit"])
        folder = os.open(self.path(name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        frames = Frames(target)
        for entry in sorted(os.listdir(folder)):
            kind = LEFT.fullmatch(entry)
            if (kind is None or int(entry.split(".")[1]) >= nodes) and entry != RUNNER_LOG:
                continue
            with open_regular(entry, folder) as file:
                if file is None:
                    continue
                size, mtime = (status := os.fstat(file.fileno())).st_size, int(status.st_mtime)
                if kind is not None and size > (MAX_RESULT if kind[1] else remaining):
                    continue
                file.seek(0 if kind else max(0, size - LOG_END))
                data = io.BufferedReader(file).read(size if kind else LOG_END)
            remaining -= len(data) if kind and kind[2] else 0
            frames.add({"name": entry, "size": len(data), "mtime": mtime}, io.BytesIO(data))

    def collect(self, name: str, options: dict[str, Any], target: BinaryIO) -> None:
        write_archive(Frames(target), self.path(name), Patterns(options["patterns"]), frozenset(options["without"]))

    def list(self, target: BinaryIO) -> None:
        frames = Frames(target)
        for name in os.listdir(self._own):
            if NAME.fullmatch(name):
                frames.add({"name": name, "size": 0}, io.BytesIO())


def _extract_member(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: str) -> None:
    """Extract a member of an archive into a folder. Replace an existing entry, and follow no links."""
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if ".." in parts or (not parts and not member.isdir()):
        raise Refused(f"{member.name!r} leads out of the folder")
    path = folder
    for part in parts[:-1]:
        path = os.path.join(path, part)
        _ensure_folder(path)
    path = os.path.join(folder, *parts)
    if member.isdir():
        _ensure_folder(path)
        return
    if os.path.lexists(path):
        remove_path(path)
    if member.issym():
        os.symlink(member.linkname, path)
    elif member.isreg():
        content = archive.extractfile(member)
        mode = member.mode & 0o700 or 0o600
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
            shutil.copyfileobj(content or io.BytesIO(), file, CHUNK)
        os.utime(path, (member.mtime, member.mtime))
    else:
        raise Refused(f"{member.name!r} is neither a file nor a folder")


def _ensure_folder(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    if not os.path.isdir(path):
        os.mkdir(path, 0o700)


def run_command(argv: list[str], stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Carry out the command line ``BASE ACCOUNT VERB [NAME]``. Raise ``Refused`` if it is not allowed."""
    base, account, verb = argv[:3]
    folders = Folders(base, account)
    if verb == "list" and len(argv) == 3:
        folders.list(stdout)
        return
    (name,) = argv[3:]
    if verb == "put":
        folders.put(name, stdin)
    elif verb == "get":
        folders.get(name, json.loads(stdin.read()), stdout)
    elif verb == "collect":
        folders.collect(name, json.loads(stdin.read()), stdout)
    elif verb == "remove":
        if os.path.lexists(folders.path(name)):
            remove_path(folders.path(name))
    else:
        raise Refused(f"there is no {verb!r}")


def main() -> int:
    """Run a verb; return 0 for success, else 1 with the reason in a line on standard error."""
    try:
        run_command(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)
        sys.stdout.flush()
    except (Refused, FoldersTooDeep) as error:
        print(error, file=sys.stderr)
    except OSError as error:
        prefix = f"{error.filename}: " if error.filename else ""
        print(f"{prefix}{error.strerror or error}", file=sys.stderr)
    except (ValueError, KeyError, TypeError, tarfile.TarError, RecursionError) as error:
        print(f"cannot be understood: {error!r}"[:300], file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
