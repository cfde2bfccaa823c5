"""Which account of this host a job is to run as, and how programs are run as another account.

Accounts are looked up anew each time, and refused where anything is odd. An agent that may change its account (root, or
one with CAP_SETUID and CAP_SETGID) does so by ``setpriv``, which leaves the program none of the agent's rights; any
other asks ``sudo``, which must not want a password.
"""

import asyncio
import os
import pwd
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
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
