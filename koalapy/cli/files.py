"""Commands for files: the catalogue of input files, and the results of jobs."""

import contextlib
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from koalapy.cli.jobs.jobs import LastJob, find_last_job
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.job_reference import JobReference
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer, show_json
from koalapy.cli.terminal.screen import Progress, Transfer, waiting_for
from koalapy.cli.terminal.tables import Columns, format_columns
from koalapy.client.client import FINAL, MAX_PAGE_SIZE, Client
from koalapy.client.errors import CliError, Exit, printable
from koalapy.client.http import Json
from koalapy.model.wording import format_bytes, format_list

Name = Annotated[str, Argument(help="the logical file", completes="replicas")]
OptionalName = Annotated[str | None, Argument(help="the logical file; default: all", completes="replicas")]
Cluster = Annotated[str | None, Option("--cluster", help="only on this cluster", completes="clusters")]
Place = Annotated[str, Argument(metavar="CLUSTER:PATH", help="absolute path of a file or folder on a cluster")]


def add_replica(name: Name, place: Place, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Add a file or folder on a cluster to the catalogue: koala replicas add climate/2026.nc north:/data/2026.nc"""
    cluster, colon, path = place.partition(":")
    if not colon or not cluster or not path:
        raise CliError(f"{place!r} is not CLUSTER:PATH", Exit.USAGE, f"write it as north:/data/{name}")
    order = {"name": name, "cluster": cluster, "path": path}
    with waiting_for(f"{cluster} reads {path}"):
        replica = daemon.client().post("/api/v1/replicas", order, patient=True)
    count = replica["parts"]
    entries = "" if count is None else f", a folder of {count} {'entry' if count == 1 else 'entries'}"
    message = f"{cluster} has {name}: {format_bytes(replica['size'])}{entries}, SHA-256 {replica['checksum']}"
    print_answer(replica, as_json, lambda _: printable(message))


def list_replicas(name: OptionalName = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """List the catalogue by name and cluster."""
    answer = {"replicas": _request_replicas(daemon.client(), name)}
    print_answer(answer, as_json, _format_replicas)


def _request_replicas(client: Client, name: str | None) -> list[Json]:
    """Return all replicas in the catalogue, or those of the file ``name``, requested page by page."""
    replicas: list[Json] = []
    cursor: Json = {}
    while True:
        page = client.get("/api/v1/replicas", name=name, limit=MAX_PAGE_SIZE, **cursor)
        replicas += page["replicas"]
        if page["next"] is None:
            return replicas
        cursor = {"after": replicas[-1]["name"], "after_cluster": replicas[-1]["cluster"]}


def verify_replicas(
    name: OptionalName = None, cluster: Cluster = None, as_json: AsJson = False, daemon: Daemon = DAEMON
) -> None:
    """Verify replicas at their clusters; only good ones are used."""
    choice = {key: value for key, value in (("name", name), ("cluster", cluster)) if value is not None}
    with waiting_for(f"{cluster or 'every cluster'} reads {name or 'all its files'}"):
        answer = daemon.client().post("/api/v1/replicas/verify", choice, patient=True)
    print_answer(answer, as_json, _format_replicas)
    if bad := [replica for replica in answer["replicas"] if replica["problem"] or replica["state"] != "good"]:
        bad_names = format_list([f"{replica['name']} on {replica['cluster']}" for replica in bad])
        raise CliError(
            f"some replicas are not good: {bad_names}", Exit.FAILED, "see the reasons above" if not as_json else ""
        )


def remove_replica(name: Name, cluster: Cluster = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Remove a logical file from the catalogue; the files on the clusters stay."""
    answer = daemon.client().delete("/api/v1/replicas", name=name, cluster=cluster)
    messages = [
        f"{name} on {replica['cluster']} is forgotten; nothing was done to the file itself, {replica['path']}"
        for replica in answer["replicas"]
    ]
    print_answer(answer, as_json, lambda _: "\n".join(map(printable, messages)))


REPLICAS: Columns = {
    "NAME": itemgetter("name"),
    "CLUSTER": itemgetter("cluster"),
    "STATE": itemgetter("state"),
    "SIZE": lambda replica: format_bytes(replica["size"]),
    "PARTS": lambda replica: "-" if replica["parts"] is None else replica["parts"],
    "SHA-256": lambda replica: replica["checksum"][:8],
    "PATH": itemgetter("path"),
    "REASON": lambda replica: replica.get("problem") or replica["reason"] or "-",
}


def _format_replicas(answer: Json) -> str:
    return format_columns(REPLICAS, answer["replicas"])


def fetch_results(
    job: LastJob = None,
    to: Annotated[Path | None, Option(help="folder for the files; default: job-JOB")] = None,
    force: Annotated[bool, Option("--force", help="overwrite existing files")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Download the collected results of a job (koala submit --collect)."""
    client = daemon.client()
    job = job or JobReference(find_last_job(client))
    folder = to or Path(f"job-{job}")
    if not force and _is_taken(folder):
        raise CliError(
            f"{folder} exists already", Exit.USAGE, "--force overwrites its files; --to takes another folder"
        )
    number = job.find_number(client)
    answer = client.job(number)
    try:
        transfer = Transfer(f"fetches into {folder}")
        with Progress(lambda: str(transfer)):
            counts = unpack_results(transfer.count_bytes(client.stream_results(number)), folder, force=force)
    except KeyboardInterrupt:
        hint = f"get the rest with koala fetch {job} --force" + (f" --to {to}" if to else "")
        raise CliError(f"{folder} is incomplete", Exit.INTERRUPTED, hint) from None
    parts = {f"{rank}-{component['cluster']}" for rank, component in enumerate(answer["components"])}
    missing = sorted(parts - counts.keys())
    if as_json:
        components = {name: {"files": count.files, "size": count.size} for name, count in counts.items()}
        show_json({"to": str(folder), "components": components, "missing": missing})
    else:
        for name, count in counts.items():
            files = f"{count.files} file{'' if count.files == 1 else 's'}"
            print(printable(f"{folder / name}: {files}, {format_bytes(count.size)}"))
    if missing:
        advice = "the job is not over" if answer["state"] not in FINAL else f"see koala show {job}"
        raise CliError(f"there are no results of {', '.join(missing)}", Exit.FAILED, advice)


def _is_taken(folder: Path) -> bool:
    """Return whether the folder has entries that could be overwritten."""
    try:
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise CliError(f"cannot read {folder}: {error.strerror}", Exit.USAGE, "give another --to") from error


replicas_group = Group(
    "List and change the catalogue of input files.",
    {"add": add_replica, "list": list_replicas, "verify": verify_replicas, "remove": remove_replica},
)


CHUNK_SIZE = 1024 * 1024


@dataclass(slots=True)
class FileCount:
    """The number and size in bytes of the files unpacked for one component."""

    files: int = 0
    size: int = 0


class _Pieces(RawIOBase):
    """A readable file object over an iterator of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the current or next piece; return the number of bytes, 0 at the end."""
        while not self._pending:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._pending = piece
        size = min(len(buffer), len(self._pending))
        buffer[:size], self._pending = self._pending[:size], self._pending[size:]
        return size


def unpack_results(pieces: Iterator[bytes], to: Path, *, force: bool) -> dict[str, FileCount]:
    """Unpack an archive into a folder; return number and size of the files by top-level folder.

    Raise ``CliError`` for members other than files and folders, and for existing files unless forced.
    """
    counts: dict[str, FileCount] = {}
    root = -1
    try:
        with tarfile.open(fileobj=BufferedReader(_Pieces(pieces), CHUNK_SIZE), mode="r|") as archive:
            to.mkdir(parents=True, exist_ok=True)
            root = os.open(to, os.O_RDONLY | os.O_DIRECTORY)
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined] # it would store every member
                parts = _split_name(member)
                count = counts.setdefault(parts[0], FileCount())
                if member.isdir():
                    os.close(_open_folder(root, parts, to))
                    continue
                _write_member(archive, member, parts, root, to, force=force)
                count.files += 1
                count.size += member.size
    except tarfile.TarError as error:
        raise CliError(f"the archive is truncated: {error}", Exit.FAILED, "try again with --force") from error
    except (ValueError, OverflowError) as error:
        message = f"the archive is invalid: {error}"
        raise CliError(message, Exit.FAILED, "use the koala command of the daemon's version") from error
    except OSError as error:
        raise CliError(f"cannot write to {to}: {error.strerror or error}", Exit.FAILED, "give another --to") from error
    finally:
        if root >= 0:
            os.close(root)
    return counts


def _split_name(member: tarfile.TarInfo) -> list[str]:
    """Split a member's name into folders and a file name. Raise ``CliError`` if it leads outside the target folder."""
    parts = member.name.rstrip("/").split("/")
    if not (member.isreg() or member.isdir()) or member.issparse() or any(p in ("", ".", "..") for p in parts):
        raise CliError(
            f"the archive has {member.name!r} in it", Exit.FAILED, "use the koala command of the daemon's version"
        )
    return parts


def _open_folder(root: int, parts: list[str], to: Path) -> int:
    """Open a folder without following links, and create it if it is missing; return its descriptor."""
    descriptor = os.dup(root)
    for depth, part in enumerate(parts):
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o755, dir_fd=descriptor)
        try:
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        except OSError as error:
            path = to.joinpath(*parts[: depth + 1])
            raise CliError(f"{path} is not a folder", Exit.FAILED, "remove it, or give another --to") from error
        finally:
            os.close(descriptor)
        descriptor = child
    return descriptor


def _write_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str], root: int, to: Path, *, force: bool
) -> None:
    """Write a file of the archive below the folder ``to``, with the open descriptor ``root``.

    Raise ``CliError`` if the file exists, unless ``force`` is set: then replace it.
    """
    content = archive.extractfile(member)
    assert content is not None, "it is a regular file"
    folder = _open_folder(root, parts[:-1], to)
    try:
        if force:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parts[-1], dir_fd=folder)
        mode = 0o755 if member.mode & 0o100 else 0o644
        handle = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
        try:
            with open(handle, "wb") as file:
                shutil.copyfileobj(content, file, CHUNK_SIZE)
                os.utime(file.fileno(), (member.mtime, member.mtime))
        except BaseException:
            # Remove an incomplete file, so that it is not taken for the complete one.
            os.unlink(parts[-1], dir_fd=folder)
            raise
    except FileExistsError as error:
        raise CliError(f"{to.joinpath(*parts)} exists already", Exit.USAGE, "--force overwrites it") from error
    finally:
        os.close(folder)
