"""The working folders of jobs that run as other accounts.

The agent stores its journals and output logs in its own folders, and opens no file where an account may write.
``runner/account_files.py`` runs as the account and does that.
"""

import asyncio
import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import koalapy
from koalapy.agent.accounts import (
    ACCOUNT_NAME,
    Account,
    AccountProcess,
    Accounts,
    RunAs,
    SwitchMethod,
    account_environment,
    account_name,
)
from koalapy.agent.core.settings import (
    DEFAULT_TIMEOUTS,
    AgentSettings,
    AgentTimeouts,
    SiteSettings,
    inherited_environment,
)
from koalapy.agent.core.spool import RUNNER_LOG, JournalFolder
from koalapy.agent.lrm.commands import RunCommand, run_command
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable, UsageError
from koalapy.runner.account_files import LEFT, LOG_END, MAX_RESULT, NAME
from koalapy.runner.folders import replace_file
from koalapy.runner.result_archive import FileSink

PROGRAM = Path(koalapy.__file__).parent / "runner" / "account_files.py"
COMMAND = "koala-account-files"
"""The same program as a command, for rules of sudo."""
OPEN_TO_ALL = 0o1733
"""Mode of a folder in which every account may create a folder, but not list or remove others."""
MAX_NAMES = 100_000
MAX_CONCURRENT = 4
"""Maximum operations per account at once, so that an account that hangs does not block others."""
THREADS = 32
Made = TypeVar("Made")


class JobFolders:
    """Creates, reads and removes the accounts' folders. All methods raise ``SiteError``."""

    def __init__(
        self,
        run_as: RunAs,
        base: Path | None = None,
        python: str = "python3",
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """Set up. ``base`` is the folder of the accounts' folders, if jobs run as several accounts."""
        self._timeouts = timeouts
        self.run_as, self.base, self._python = run_as, base, python
        self._threads, self._closing = ThreadPoolExecutor(THREADS, "account"), Event()
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._names_by_uid: dict[int, str] = {}
        self._owned: set[tuple[str, int]] = set()
        """Names and owners of folders whose owners have their names."""

    @classmethod
    def from_settings(cls, settings: AgentSettings, timeouts: AgentTimeouts = DEFAULT_TIMEOUTS) -> "JobFolders":
        """Return the folders of a cluster."""
        run_as = RunAs(Accounts(settings.cluster, settings))
        return cls(run_as, settings.accounts_directory, settings.python, timeouts)

    @classmethod
    def for_own_account(cls, run_command: RunCommand = run_command) -> "JobFolders":
        """Return the folders of an agent that runs all jobs as its own account."""
        return cls(RunAs(Accounts("", SiteSettings()), run_command=run_command))

    @property
    def is_mapped(self) -> bool:
        return self.run_as.accounts.is_mapped

    def prepare_base(self) -> None:
        """Create the folder in which each account creates its own. Raise ``UsageError``."""
        if self.base is None:
            return
        try:
            self.base.mkdir(parents=True, exist_ok=True)
            status = self.base.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise UsageError(
                    f"{self.base} does not belong to this agent's account, but to uid {status.st_uid}",
                    field="stage_directory",
                    value=str(self.base),
                    hint="set a folder of the agent's account that the accounts of all users may enter",
                )
            self.base.chmod(OPEN_TO_ALL)
        except OSError as error:
            raise UsageError(
                f"cannot use {self.base}: {error.strerror}", field="stage_directory", value=str(self.base)
            ) from error

    def folder_path(self, user: str, name: str) -> Path:
        """Return the path of a named folder of an account. Raise ``SiteRejected`` if the account can have none."""
        if self.base is None or not ACCOUNT_NAME.fullmatch(user):
            raise SiteRejected(f"the account {user!r} cannot have a folder on this cluster", fault=SiteFault.UNSUITABLE)
        return self.base / user / name

    def stage_path(self, user: str, instance: str, token: str) -> Path:
        return self.folder_path(user, f"stage-{instance}-{token}")

    def list_accounts(self) -> frozenset[str]:
        """Return the accounts that have or had jobs on this cluster, by their folders. Raise ``SiteUnavailable``.

        Any account may make folders of any names. Those count whose owner has their name, or was removed.
        """
        if self.base is None or not self.is_mapped:
            return frozenset()
        folders: set[tuple[str, int]] = set()
        try:
            with os.scandir(self.base) as entries:
                for entry in entries:
                    if ACCOUNT_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            folders.add((entry.name, entry.stat(follow_symlinks=False).st_uid))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._owned:  # the agent has not run yet
                return frozenset()
            raise SiteUnavailable(f"cannot list {self.base}: {error.strerror}") from error
        names = {uid: account_name(uid) for uid in {uid for _, uid in folders - self._owned}}
        self._owned |= {(name, uid) for name, uid in folders if names.get(uid) == name}
        return frozenset(name for name, uid in folders if (name, uid) in self._owned or names[uid] == str(uid))

    async def account_names(self) -> Mapping[int, str]:
        """Return the accounts with jobs here by user id, including removed ones, which may still have jobs."""
        for name in await asyncio.to_thread(self.list_accounts) - set(self._names_by_uid.values()):
            with contextlib.suppress(SiteRejected):
                self._names_by_uid[(await self.run_as.accounts.find_account(name)).uid] = name
        return self._names_by_uid

    async def make_folder(self, user: str, folder: Path, files: Mapping[str, bytes]) -> None:
        """Create an account's folder with files."""
        await self._put_files(user, folder, partial(_add_files, files))

    async def copy_to_account(self, user: str, tree: Path, folder: Path) -> None:
        """Copy a tree of the agent's files into a folder that an account owns."""
        await self._put_files(user, folder, lambda archive: archive.add(tree, arcname=".", filter=_plain))

    async def fetch_results(self, user: str, folder: Path, into: JournalFolder, nodes: int, limit: int) -> None:
        """Copy the runners' new results, output, and the end of their log into the agent's folder."""

        def take(process: AccountProcess) -> None:
            """Store the files that the process sends. Raise ``SiteRejected`` for unexpected or oversized ones."""
            process.send_request({"nodes": nodes, "limit": limit})
            remaining, count = limit, 0
            while (entry := process.read_frame()) is not None:
                name, size, count = entry["name"], entry["size"], count + 1
                kind = LEFT.fullmatch(name)
                max_size = LOG_END if kind is None else MAX_RESULT if kind[1] else remaining
                is_ours = name == RUNNER_LOG or (kind is not None and int(name.split(".")[1]) < nodes)
                if not is_ours or size > max_size or count > 2 * nodes + 1000:
                    raise SiteRejected(
                        f"account {user} sent {name[:60]!r} of {size} bytes, which "
                        "is too large, or not a log or result file of a runner"
                    )
                remaining -= size if kind and kind[2] else 0
                data, time = process.open_content(size).read(), entry.get("mtime")
                modified_at = min(max(0, time), 1 << 40) if isinstance(time, int) else 0
                if not (kind and kind[1]) or into.read_result(int(name.split(".")[1])) is None:
                    try:
                        replace_file(into.path / name, data, sync=False, modified_at=modified_at)
                    except OSError as error:
                        raise SiteUnavailable(f"cannot write {into.path / name}: {error.strerror}") from error

        await self._call_process(user, "get", folder, take)

    def collect_files(
        self, user: str, folder: Path, patterns: Sequence[str], without: Collection[str], to: FileSink
    ) -> None:
        """Add an account's files that match the patterns to an archive. Blocks."""
        account = self.run_as.accounts.find_account_blocking(user)
        with self._start_process(account, "collect", folder) as process:
            process.send_request({"patterns": list(patterns), "without": list(without)})
            while (entry := process.read_frame()) is not None:
                member = tarfile.TarInfo(entry["name"])
                member.size = entry["size"]
                member.mode = 0o755 if entry.get("mode") == 0o755 else 0o644
                member.mtime = entry["mtime"] if isinstance(entry.get("mtime"), int) else 0
                to.addfile(member, process.open_content(member.size))  # type: ignore[arg-type]
            process.finish()

    async def remove_folder(self, user: str, folder: Path) -> None:
        await self._call_process(user, "remove", folder, AccountProcess.send_request)

    async def list_names(self, user: str) -> frozenset[str]:
        """Return the names of the folders that the agent made in an account. Ignore names of any other form."""
        names: list[str] = []

        def take(process: AccountProcess) -> None:
            process.send_request()
            while (entry := process.read_frame()) is not None:
                names.append(entry["name"])
                if len(names) > MAX_NAMES:
                    raise SiteRejected(f"account {user} has more than {MAX_NAMES:,} job folders")

        await self._call_process(user, "list", None, take)
        return frozenset(name for name in names if NAME.fullmatch(name))

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _put_files(self, user: str, folder: Path, add: Callable[[tarfile.TarFile], None]) -> None:
        """Create an account's folder with the files that ``add`` writes to an archive."""

        def write(process: AccountProcess) -> None:
            with tarfile.open(fileobj=process, mode="w|", format=tarfile.PAX_FORMAT) as archive:
                add(archive)
            process.send_request()

        try:
            await self._call_process(user, "put", folder, write)
        except OSError as error:
            raise SiteUnavailable(f"cannot read {error.filename}: {error.strerror}") from error

    async def _call_process(
        self, user: str, verb: str, folder: Path | None, talk: Callable[[AccountProcess], Any]
    ) -> None:
        """Run an operation (``verb``) on a folder as an account; ``talk`` exchanges its data with the process."""
        account = await self.run_as.accounts.find_account(user)

        def call() -> None:
            with self._start_process(account, verb, folder) as process:
                talk(process)
                process.finish()

        await self.run_in_turn(user, self._threads, call)

    async def run_in_turn(self, user: str, threads: Executor, work: Callable[[], None]) -> None:
        """Run a blocking call for an account in a thread; limit the threads of each account.

        A thread counts until its call returns, even if the caller was cancelled.
        """
        turn = self._turns.setdefault(user, asyncio.Semaphore(MAX_CONCURRENT))
        await turn.acquire()
        running = asyncio.get_running_loop().run_in_executor(threads, work)
        running.add_done_callback(lambda _: turn.release())
        await asyncio.shield(running)

    def _start_process(self, account: Account, verb: str, folder: Path | None) -> AccountProcess:
        """Start the program that carries out an operation (``verb``) as an account, on folders below ``base`` only."""
        if self.run_as.switch_method is SwitchMethod.SUDO:
            program: Sequence[str] = (str(Path(self._python).with_name(COMMAND)),)
        else:
            program = (self._python, "-I", "-S", str(PROGRAM))
        argv = [*program, str(self.base), account.name, verb, *([folder.name] if folder else [])]
        command = self.run_as.build_command(account, argv)
        environment, stall_s = account_environment(account, inherited_environment()), self._timeouts.account_stall_s
        return AccountProcess(command, environment, account.name, stall_s, is_closing=self._closing.is_set)


def _add_files(files: Mapping[str, bytes], archive: tarfile.TarFile) -> None:
    """Add files to an archive by name and content, those that begin with ``#!`` as executable."""
    for name, data in files.items():
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o700 if data.startswith(b"#!") else 0o600
        archive.addfile(member, io.BytesIO(data))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Keep files, folders, and links to replicas; the account resolves the links, not the agent."""
    if member.islnk() or not (member.isfile() or member.isdir() or member.issym()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = stat.S_IMODE(member.mode)
    return member
