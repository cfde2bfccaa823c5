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
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.commands import CommandResult, RunCommand, run_command
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

ACCOUNT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""What may go into a path and onto a command line; no number, or it might be taken for one."""
CLOSED = ("nologin", "false")
CAP_SETGID, CAP_SETUID = 1 << 6, 1 << 7
NO_RULE = re.compile(r"^sudo: .*(password|not allowed|unknown user|effective uid|sudoers)|^Sorry, user", re.MULTILINE)
"""What sudo says when it does not run something; what is run speaks for itself."""
LEFT_OUT = ("TMPDIR", "MAIL", "XDG_RUNTIME_DIR")
"""Of the agent's environment: they are its own."""
EXIT_TIMEOUT = 10.0
MAX_HEADER = 16 * 1024
"""Bytes of the line that says what comes."""
MAX_ERROR = 2000
CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def look_up_account(name: str) -> Account | None:
    """Blocks; ``OSError`` when the name service does not answer."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = tuple(os.getgrouplist(found.pw_name, found.pw_gid))
    return Account(found.pw_name, found.pw_uid, found.pw_gid, groups, found.pw_dir, found.pw_shell)


class Accounts:
    """Decides by the cluster's ``identity``; everything raises ``SiteRejected`` for who may not run anything here."""

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
        """Whether what the agent ran for itself would be root's, where jobs are others'."""
        return self.is_mapped and self.own_uid == 0

    def account_for(self, local_user: str) -> str:
        """As whom somebody's job is to be handled; empty for the agent's own account. To be admitted before it runs."""
        if self._identity == "service":
            return ""
        return "" if self._identity == "own" and local_user == account_name(self.own_uid) else local_user

    def admit(self, user: str) -> None:
        """Refuse what cannot be, before anything is looked up."""
        if self._identity == "own" and user:
            raise self._refused(
                f"jobs on {self._cluster} run as {account_name(self.own_uid)} alone, and not as {user!r}",
                f"only the jobs of clusters.{self._cluster}.user may run there",
            )
        if self._identity == "mapped" and not user:
            raise self._refused(
                f"{self._cluster} runs jobs as their owners' accounts, and nobody said which that is",
                f"give the owner an account on {self._cluster} under users.NAME.accounts",
            )

    async def find_account(self, user: str) -> Account:
        """As ``find_now``, which blocks for as long as the host's name service does."""
        return await asyncio.to_thread(self.find_account_blocking, user)

    def find_account_blocking(self, user: str) -> Account:
        """The account of that name, that people's jobs may run as; ``SiteUnavailable`` when nobody can say."""
        self.admit(user)
        if not self.is_mapped:
            raise self._refused(f"{self._cluster} runs jobs as one account, and not as {user!r}", "see its identity")
        if not ACCOUNT_NAME.fullmatch(user) or user.isdecimal():
            raise self._refused(f"{user!r} is no name of an account", "correct users.NAME.accounts")
        try:
            found = self._lookup(user)
        except OSError as error:
            raise SiteUnavailable(f"{self._cluster} cannot look up the account {user}: {error}") from error
        if found is None or found.name != user:
            raise self._refused(f"there is no account {user} on {self._cluster}", "correct users.NAME.accounts")
        if problem := self._problem(found):
            raise self._refused(
                f"no job may run as {user} on {self._cluster}: {problem}", "map it to a person's account"
            )
        return found

    def _problem(self, found: Account) -> str:
        if found.uid < self._min_uid or found.uid == 0:
            return f"its uid {found.uid} is a system account's (below {self._min_uid})"
        if found.uid == self.own_uid:
            return "that is the agent's own account"
        if found.gid == 0:
            return "its group is root's"
        if os.path.basename(found.shell) in CLOSED:
            return f"it is closed ({found.shell})"
        return ""

    def _refused(self, message: str, hint: str) -> SiteRejected:
        return SiteRejected(message, field="account", hint=hint, fault=SiteFault.UNSUITABLE)


def account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class SwitchMethod(StrEnum):
    SETUID = "setuid"
    SUDO = "sudo"
    NONE = "none"


def detect_switch_method() -> SwitchMethod:
    """By which this process may act as others, as far as can be told without trying."""
    if os.geteuid() == 0 or _may_change_account():
        return SwitchMethod.SETUID
    return SwitchMethod.SUDO if shutil.which("sudo") else SwitchMethod.NONE


def _may_change_account() -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    wanted = CAP_SETGID | CAP_SETUID
    return found is not None and int(found[1], 16) & wanted == wanted


class RunAs:
    """Makes commands that run as somebody, and runs them. ``SiteError`` for who may not run anything here."""

    def __init__(
        self, accounts: Accounts, way: SwitchMethod | None = None, run_command: RunCommand = run_command
    ) -> None:
        self.accounts, self._run_command = accounts, run_command
        self.switch_method = way or (detect_switch_method() if accounts.is_mapped else SwitchMethod.NONE)

    async def run(self, user: str, *argv: str, environment: Mapping[str, str], **options: Any) -> CommandResult:
        """As ``commands.run``, by that account; as the agent itself where none is named."""
        if not user:
            return await self._run_command(*argv, environment=environment, **options)
        account = await self.accounts.find_account(user)
        command = self.build_command(account, argv, environment.get("PATH"))
        answer = await self._run_command(*command, environment=account_environment(account, environment), **options)
        if self.switch_method is SwitchMethod.SUDO and answer.code != 0 and NO_RULE.search(answer.errors):
            raise SiteRejected(
                f"sudo does not let this agent run {argv[0]} as {user}: {answer.error_line.removeprefix('sudo: ')}",
                hint="see docs/clusters.md, Whose processes, for the rules that it needs",
                fault=SiteFault.SITE,
            )
        return answer

    def build_command(self, account: Account, argv: Sequence[str], path: str | None = None) -> list[str]:
        """The command line by which an account runs a command; of ``path`` the folders in which it is looked for."""
        if self.switch_method is SwitchMethod.SETUID:
            groups = ",".join(map(str, sorted({account.gid, *account.groups})))
            own = ["--reuid", str(account.uid), "--regid", str(account.gid), "--groups", groups]
            return [_program("setpriv"), *own, "--inh-caps", "-all", "--ambient-caps", "-all", "--", *argv]
        if self.switch_method is SwitchMethod.SUDO:
            program = shutil.which(argv[0], path=path)
            if program is None:
                raise SiteRejected(f"there is no {argv[0]} on the agent's PATH", fault=SiteFault.SITE)
            return [_program("sudo"), "-n", "-u", account.name, "--", program, *argv[1:]]
        raise SiteRejected(
            "this agent may act for nobody: it is not root, has no CAP_SETUID and CAP_SETGID, and there is no sudo",
            hint="see docs/clusters.md, Whose processes",
            fault=SiteFault.SITE,
        )


def _program(name: str) -> str:
    """Of the agent's own path: what is run by it may have another."""
    return shutil.which(name) or f"/usr/bin/{name}"


def drop_capabilities(*argv: str) -> list[str]:
    """A command without what this agent may beyond its account: for what speaks with other sites."""
    if os.geteuid() == 0 or not _may_change_account():
        return [*argv]
    return [_program("setpriv"), "--inh-caps", "-all", "--ambient-caps", "-all", "--", *argv]


def account_environment(account: Account, given: Mapping[str, str]) -> dict[str, str]:
    """What is inherited, with what is the account's own in place of what is the agent's."""
    kept = {name: value for name, value in given.items() if name not in LEFT_OUT}
    own = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell or "/bin/sh"}
    return kept | own


class AccountProcess(io.RawIOBase):
    """Writable, and readable frame by frame. ``SiteUnavailable`` when it does not go on, ``SiteRejected`` in its own
    words."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], who: str, stall_s: float) -> None:
        """``who`` it runs as, for people; ``stall_s``: seconds without a byte after which it is given up."""
        self._who, self._stall_s = who, stall_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._errors.close()
            raise SiteUnavailable(f"cannot run {command[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
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
        """All of it; what is not taken because it has ended is told by ``finish``."""
        left = memoryview(data).cast("B")
        size = len(left)
        with contextlib.suppress(BrokenPipeError):
            while left:
                self._wait(self._in, writing=True)
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(self._in, left[:CHUNK]) :]
        return size

    def send_request(self, request: object = None) -> None:
        """Write a request, if there is one, and say that no more comes."""
        if request is not None:
            self.write(json.dumps(request).encode())
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def read_frame(self) -> dict[str, Any] | None:
        """What it says comes next, to be checked by the caller; None at the end of all."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_HEADER:
                raise self._odd()
            if not (data := self._read()):
                if self._buffer:
                    raise self._odd()
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            known = json.loads(line) if len(line) <= MAX_HEADER else None
        except (ValueError, RecursionError):
            known = None
        if not isinstance(known, dict) or not isinstance(known.get("name"), str):
            raise self._odd()
        if type(known.get("size")) is not int or known["size"] < 0:
            raise self._odd()
        return known

    def open_content(self, size: int) -> "Content":
        return Content(self, size)

    def read_some(self, most: int) -> bytes:
        if not self._buffer:
            self._buffer = self._read()
        data, self._buffer = self._buffer[:most], self._buffer[most:]
        if not data:
            raise self._odd()
        return data

    def finish(self) -> None:
        self.send_request()
        while self._read():
            pass
        try:
            code = self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise self._stuck() from error
        if code:
            self._errors.seek(0)
            words = " ".join(self._errors.read(MAX_ERROR).decode(errors="replace").split()) or f"exit code {code}"
            raise SiteRejected(f"as {self._who}: {words}", fault=SiteFault.UNKNOWN)

    def kill(self) -> None:
        """It is not waited for any more; one that may not be killed sees that nobody reads."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(EXIT_TIMEOUT)
        self._errors.close()

    def _read(self) -> bytes:
        while True:
            self._wait(self._out, writing=False)
            with contextlib.suppress(BlockingIOError):
                return os.read(self._out, CHUNK)

    def _wait(self, descriptor: int, *, writing: bool) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
        if not poll.poll(self._stall_s * 1000):
            raise self._stuck()

    def _stuck(self) -> SiteUnavailable:
        return SiteUnavailable(f"what runs as {self._who} has said nothing for {self._stall_s:g} s")

    def _odd(self) -> SiteRejected:
        return SiteRejected(f"what runs as {self._who} says what is not understood", fault=SiteFault.UNKNOWN)


class Content(io.RawIOBase):
    """The bytes of one frame, no more and no fewer."""

    def __init__(self, process: AccountProcess, size: int) -> None:
        self._process, self._left = process, size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        pieces = []
        while wanted:
            pieces.append(self._process.read_some(wanted))
            wanted -= len(pieces[-1])
            self._left -= len(pieces[-1])
        return b"".join(pieces)
