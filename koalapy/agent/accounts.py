"""The accounts of a host that jobs run as, and programs that run as another account.

Accounts are looked up each time, and rejected in case of doubt. An agent that may change its account (root, or one with
CAP_SETUID and CAP_SETGID) does so by ``setpriv``, which drops all rights of the agent. Any other uses ``sudo``, which
must not ask for a password.
"""

import asyncio
import contextlib
import io
import json
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.commands import CommandResult, RunCommand, run_command
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable
from koalapy.runner.processes import processor_ticks

ACCOUNT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""Names that are safe in a path and on a command line. Numbers are rejected elsewhere, since they may be uids."""
CLOSED_SHELLS = ("nologin", "false")
CAP_SETGID, CAP_SETUID = 1 << 6, 1 << 7
SUDO_REJECTION = re.compile(
    r"^sudo: .*(password|not allowed|unknown user|effective uid|sudoers)|^Sorry, user", re.MULTILINE
)
"""Messages of sudo itself when it does not run a command."""
OWN_VARIABLES = ("TMPDIR", "MAIL", "XDG_RUNTIME_DIR")
"""Variables of the agent that commands of other accounts do not inherit."""
EXIT_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 16 * 1024
MAX_ERROR_BYTES = 2000
CHUNK_BYTES = 1 << 16
MAX_STALLS = 240
"""Times ``stall_s`` that an operation may wait for an account's process in all, besides the time for its bytes."""
MIN_RATE = 1 << 18
"""Bytes per second that such a process must at least move in the long run."""


@dataclass(frozen=True, slots=True)
class Account:
    """An account of this host."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def look_up_account(name: str) -> Account | None:
    """Return an account or None. It blocks; raise ``OSError`` if the name service does not answer."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir, entry.pw_shell)


class Accounts:
    """The accounts that jobs of a cluster may run as, by its ``identity``. Others raise ``SiteRejected``."""

    def __init__(
        self, cluster: str, settings: SiteSettings, lookup: Callable[[str], Account | None] = look_up_account
    ) -> None:
        self._cluster, self._identity, self._min_uid = cluster, settings.identity, settings.min_uid
        self._lookup = lookup
        self.own_uid = os.geteuid()

    @property
    def is_mapped(self) -> bool:
        """Whether jobs run as accounts other than the agent's own."""
        return self._identity == "mapped"

    @property
    def acts_as_root(self) -> bool:
        """Whether processes of the agent itself run as root while jobs run as other accounts."""
        return self.is_mapped and self.own_uid == 0

    def account_for(self, local_user: str) -> str:
        """Return the account for a user's job, empty for the agent's own. Pass it to ``admit`` before the job runs."""
        if self._identity == "service":
            return ""
        return "" if self._identity == "own" and local_user == account_name(self.own_uid) else local_user

    def admit(self, user: str) -> None:
        """Raise ``SiteRejected`` if the cluster's identity setting excludes an account. Do not look the account up."""
        if self._identity == "own" and user:
            raise self._rejection(
                f"jobs on {self._cluster} run only as {account_name(self.own_uid)}, not as {user!r}",
                f"only the jobs of clusters.{self._cluster}.user may run there",
            )
        if self._identity == "mapped" and not user:
            raise self._rejection(
                f"{self._cluster} runs jobs as their owners' accounts, and this job's owner has none there",
                f"give the owner an account on {self._cluster} under users.NAME.accounts",
            )

    async def find_account(self, user: str) -> Account:
        """Return the account of that name, looked up in a thread. Raise ``SiteError``."""
        return await asyncio.to_thread(self.find_account_blocking, user)

    def find_account_blocking(self, user: str) -> Account:
        """Return the account of that name if jobs may run as it. Raise ``SiteError``. It blocks."""
        self.admit(user)
        if not self.is_mapped:
            raise self._rejection(
                f"{self._cluster} runs jobs as one account, not as {user!r}",
                f"set clusters.{self._cluster}.identity to mapped if jobs are to run as their owners' accounts",
            )
        if not ACCOUNT_NAME.fullmatch(user) or user.isdecimal():
            raise self._rejection(f"{user!r} is not a valid account name", "correct users.NAME.accounts")
        try:
            account = self._lookup(user)
        except OSError as error:
            raise SiteUnavailable(f"{self._cluster} cannot look up the account {user}: {error}") from error
        if account is None or account.name != user:
            raise self._rejection(f"there is no account {user} on {self._cluster}", "correct users.NAME.accounts")
        problem = ""
        if account.uid < self._min_uid or account.uid == 0:
            problem = f"its uid {account.uid} is below min_uid ({self._min_uid}), as of system accounts"
        elif account.uid == self.own_uid:
            problem = "it is the agent's own account"
        elif account.gid == 0:
            problem = "its group is root"
        elif os.path.basename(account.shell) in CLOSED_SHELLS:
            problem = f"it is closed (its shell is {account.shell})"
        if problem:
            raise self._rejection(
                f"no job may run as {user} on {self._cluster}: {problem}", "map it to a user's account"
            )
        return account

    def _rejection(self, message: str, hint: str) -> SiteRejected:
        return SiteRejected(message, field="account", hint=hint, fault=SiteFault.UNSUITABLE)


def account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class SwitchMethod(StrEnum):
    """How an agent runs commands as other accounts."""

    SETUID = "setuid"
    SUDO = "sudo"
    NONE = "none"


def detect_switch_method() -> SwitchMethod:
    """Return how this process can run commands as other accounts, as far as is known without a trial."""
    if os.geteuid() == 0 or _may_change_account():
        return SwitchMethod.SETUID
    return SwitchMethod.SUDO if shutil.which("sudo") else SwitchMethod.NONE


def _may_change_account() -> bool:
    """Return whether this process has the capabilities to run commands as other accounts."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    required = CAP_SETGID | CAP_SETUID
    return match is not None and int(match[1], 16) & required == required


class RunAs:
    """Runs commands as other accounts. Methods raise ``SiteError`` for accounts that jobs may not run as."""

    def __init__(
        self, accounts: Accounts, switch_method: SwitchMethod | None = None, run_command: RunCommand = run_command
    ) -> None:
        self.accounts, self._run_command = accounts, run_command
        self.switch_method = switch_method or (detect_switch_method() if accounts.is_mapped else SwitchMethod.NONE)

    async def run(self, user: str, *argv: str, environment: Mapping[str, str], **options: Any) -> CommandResult:
        """Run a command as an account, or as the agent itself if ``user`` is empty; see ``run_command``."""
        if not user:
            return await self._run_command(*argv, environment=environment, **options)
        account = await self.accounts.find_account(user)
        command = self.build_command(account, argv, environment.get("PATH"))
        answer = await self._run_command(*command, environment=account_environment(account, environment), **options)
        if self.switch_method is SwitchMethod.SUDO and answer.code != 0 and SUDO_REJECTION.search(answer.errors):
            raise SiteRejected(
                f"sudo does not let this agent run {argv[0]} as {user}: {answer.error_line.removeprefix('sudo: ')}",
                hint="see docs/clusters.md, Job accounts, for the rules that it needs",
                fault=SiteFault.SITE,
            )
        return answer

    def build_command(self, account: Account, argv: Sequence[str], path: str | None = None) -> list[str]:
        """Return the command line that runs ``argv`` as an account; ``path`` are the folders to search for it."""
        if self.switch_method is SwitchMethod.SETUID:
            groups = ",".join(map(str, sorted({account.gid, *account.groups})))
            identity = ["--reuid", str(account.uid), "--regid", str(account.gid), "--groups", groups]
            return [_find_program("setpriv"), *identity, "--inh-caps", "-all", "--ambient-caps", "-all", "--", *argv]
        if self.switch_method is SwitchMethod.SUDO:
            program = shutil.which(argv[0], path=path)
            if program is None:
                raise SiteRejected(f"{argv[0]} is not on the agent's PATH", fault=SiteFault.SITE)
            return [_find_program("sudo"), "-n", "-u", account.name, "--", program, *argv[1:]]
        raise SiteRejected(
            "this agent cannot run anything as other accounts: it has no root rights, capabilities or sudo",
            hint="see docs/clusters.md, Job accounts",
            fault=SiteFault.SITE,
        )


def _find_program(name: str) -> str:
    """Return the path of a program on the agent's own PATH, which may differ from the command's."""
    return shutil.which(name) or f"/usr/bin/{name}"


def drop_capabilities(*argv: str) -> list[str]:
    """Return a command that runs without the agent's capabilities, for programs that talk to other sites."""
    if os.geteuid() == 0 or not _may_change_account():
        return [*argv]
    return [_find_program("setpriv"), "--inh-caps", "-all", "--ambient-caps", "-all", "--", *argv]


def account_environment(account: Account, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment of the agent with the home, name and shell of an account."""
    inherited = {name: value for name, value in environment.items() if name not in OWN_VARIABLES}
    names = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    return inherited | names | {"SHELL": account.shell or "/bin/sh"}


class AccountProcess(io.RawIOBase):
    """A process of another account: a stream to write to, and to read frame by frame.

    The account controls the process, so every wait has a timeout, as have all together, and everything read has a
    limit. Methods raise ``SiteUnavailable`` if it stalls, and ``SiteRejected`` with its own message if it fails.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        account: str,
        stall_s: float,
        now: Callable[[], float] = time.monotonic,
        is_closing: Callable[[], bool] = lambda: False,
    ) -> None:
        """``account``: its name, for messages. ``stall_s``: seconds without a byte until it is given up.

        A process that uses processor time is not given up, unless ``is_closing`` returns that the agent is stopping.
        """
        self._account, self._stall_s, self._now, self._is_closing = account, stall_s, now, is_closing
        self._waited, self._moved_bytes = 0.0, 0
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise SiteUnavailable(f"cannot run {command[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._errors = self._process.stderr.fileno()
        for pipe in (self._in, self._out, self._errors):
            os.set_blocking(pipe, False)
        self._buffer = b""

    def __enter__(self) -> "AccountProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``. If the process ends, the remainder is dropped and ``finish`` raises its error."""
        unsent = memoryview(data).cast("B")
        size = len(unsent)
        with contextlib.suppress(BrokenPipeError):
            while unsent:
                self._wait(self._in, writing=True)
                with contextlib.suppress(BlockingIOError):
                    written = os.write(self._in, unsent[:CHUNK_BYTES])
                    unsent, self._moved_bytes = unsent[written:], self._moved_bytes + written
        return size

    def send_request(self, request: object = None) -> None:
        """Write a request, if given, and close the input."""
        if request is not None:
            self.write(json.dumps(request).encode())
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def read_frame(self) -> dict[str, Any] | None:
        """Return the next header, with ``name`` and ``size``; None at the end. The caller checks its other fields."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_HEADER_BYTES:
                raise self._wrong_answer()
            if not (data := self._read()):
                if self._buffer:
                    raise self._wrong_answer()
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            header = json.loads(line) if len(line) <= MAX_HEADER_BYTES else None
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or not isinstance(header.get("name"), str):
            raise self._wrong_answer()
        if type(header.get("size")) is not int or header["size"] < 0:
            raise self._wrong_answer()
        return header

    def open_content(self, size: int) -> "Content":
        return Content(self, size)

    def read_some(self, max_bytes: int) -> bytes:
        """Return at least one byte. Raise ``SiteRejected`` at the end."""
        if not self._buffer:
            self._buffer = self._read()
        data, self._buffer = self._buffer[:max_bytes], self._buffer[max_bytes:]
        if not data:
            raise self._wrong_answer()
        return data

    def finish(self) -> None:
        """Wait until the process ends. Raise ``SiteError`` unless it succeeds."""
        self.send_request()
        if self._buffer or self._read():
            raise self._wrong_answer()
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise self._stalled() from error
        if code:
            errors = b""
            with contextlib.suppress(BlockingIOError):  # raised if it left a process, and no message
                errors = os.read(self._errors, MAX_ERROR_BYTES)
            message = " ".join(errors.decode(errors="replace").split()) or f"exit code {code}"
            raise SiteRejected(f"as {self._account}: {message}", fault=SiteFault.UNKNOWN)

    def kill(self) -> None:
        """Kill the process and close its pipes. One that may not be killed ends when its output is closed."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(EXIT_TIMEOUT_S)

    def _read(self) -> bytes:
        """Wait for output of the process and return some; empty at the end. Raise ``SiteUnavailable`` if it stalls."""
        while True:
            self._wait(self._out, writing=False)
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._out, CHUNK_BYTES)
                self._moved_bytes += len(data)
                return data

    def _wait(self, descriptor: int, *, writing: bool) -> None:
        """Wait until a pipe is ready, or a while if the process works. Raise ``SiteUnavailable`` if it stalls."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
        if self._waited > MAX_STALLS * self._stall_s + self._moved_bytes / MIN_RATE:
            raise SiteUnavailable(f"the process of {self._account} is too slow: it made {self._waited:.0f} s of pauses")
        began = self._now()
        if not poll.poll(half := self._stall_s * 500):
            ticks = processor_ticks(self._process.pid)
            if not poll.poll(half) and (self._is_closing() or processor_ticks(self._process.pid) == ticks):
                raise self._stalled()
        self._waited += self._now() - began

    def _stalled(self) -> SiteUnavailable:
        return SiteUnavailable(f"the process of {self._account} has sent nothing for {self._stall_s:g} s")

    def _wrong_answer(self) -> SiteRejected:
        return SiteRejected(f"the process of {self._account} has sent an invalid message", fault=SiteFault.UNKNOWN)


class Content(io.RawIOBase):
    """The content of one frame that another account's process sends, as a readable file."""

    def __init__(self, process: AccountProcess, size: int) -> None:
        self._process, self._remaining = process, size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes of the content from the process; all remaining bytes if negative. Block."""
        missing = self._remaining if size < 0 else min(size, self._remaining)
        self._remaining -= missing
        chunks = []
        while missing:
            chunks.append(self._process.read_some(missing))
            missing -= len(chunks[-1])
        return b"".join(chunks)
