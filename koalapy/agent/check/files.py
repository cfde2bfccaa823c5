"""Whether files can be brought to a cluster, and be had from it; leaves everything as it was."""

import os
import re
import tempfile
from pathlib import Path

from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.lrm.commands import run_command
from koalapy.agent.lrm.port import Finding
from koalapy.agent.transfers.exports import RSYNC
from koalapy.model.errors import SiteError

SHARED = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "gluster",
    "afs",
    "panfs",
    "pvfs",
    "orangefs",
    "weka",
)
"""How the types of file systems begin that several hosts can see."""


async def check_files(settings: AgentSettings) -> list[Finding]:
    """rsync, the folder for stages, and those for replicas."""
    setting = f"set clusters.{settings.cluster}.stage_directory"
    stages = shared_folder(
        settings,
        "stage directory",
        settings.stages,
        f"{setting} to another",
        f"{setting} to a folder on a shared file system",
    )
    return [await _check_rsync(), stages, *_check_replicas(settings)]


async def _check_rsync() -> Finding:
    hint = "install rsync on this host: without it no files come from other clusters, and none go there"
    try:
        answer = await run_command(RSYNC, "--version")
    except SiteError as error:
        return Finding("rsync", False, error.message, hint)
    version = re.search(r"version v?([\d.]+)", answer.output.decode(errors="replace"))
    if answer.code or version is None:
        return Finding("rsync", False, f"{RSYNC} is none: {answer.error_line}", hint)
    return Finding("rsync", True, version[1])


def _check_replicas(settings: AgentSettings) -> list[Finding]:
    """Only to be read by us; who writes there is not our business."""
    setting = f"clusters.{settings.cluster}.replica_directories"
    if not settings.replica_directories:
        hint = f"if files of jobs lie on this cluster, name the folders in {setting}"
        return [Finding("replica directories", True, "none: this cluster has no replicas to offer", hint)]
    findings = []
    for path in settings.replica_directories:
        try:
            os.listdir(path)
            findings.append(Finding("replica directory", True, str(path)))
        except OSError as error:
            if settings.lrm.on_this_host and isinstance(error, FileNotFoundError):
                continue  # The agent makes it.
            problem = f"{path} cannot be read: {error.strerror}"
            findings.append(Finding("replica directory", False, problem, f"make it readable, or correct {setting}"))
    return findings


def shared_folder(settings: AgentSettings, what: str, folder: Path, another: str, shared: str) -> Finding:
    """A folder that the agent writes to and that the nodes must see; ``another`` and ``shared`` are ways out."""
    path = folder.absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        # Only trying tells: a file system may be read-only, full, or no friend of root's.
        with tempfile.TemporaryDirectory(prefix=".koala-check-", dir=there):
            pass
    except OSError as error:
        problem = f"{path} cannot be {'written to' if there == path else 'made'}: {error.strerror}"
        return Finding(what, False, problem, f"{another}, or let {_user()} write to {there}")
    if settings.lrm.on_this_host:
        return Finding(what, True, str(path))
    kind = file_system(there.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    if kind.removeprefix("fuse.").startswith(SHARED):
        return Finding(what, True, f"{path} ({kind}, shared)")
    found = f"{path} ({kind}, a local disk unless it is shared with the nodes)"
    return Finding(what, True, found, f"the nodes must see it under this path: {shared}")


def _user() -> str:
    return os.environ.get("USER") or f"user {os.getuid()}"


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system that holds a path, by the text of ``/proc/self/mountinfo``."""
    found, longest = "unknown", -1
    for line in mounts.splitlines():
        mount, _, rest = line.partition(" - ")
        # Blanks in names are written as octal numbers.
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split(" ")[4]))
        if path.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = rest.split(" ")[0], len(point.parts)
    return found
