"""Runs programs as another account: by dropping privileges for each, or by rules of sudo that name what may be run.

Whoever may change his account (root, or an agent with CAP_SETUID and CAP_SETGID) does so by ``setpriv``, which leaves
the program nothing of what the agent may; anybody else asks ``sudo``, which must not want a password.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from koalapy.agent.accounts.accounts import Account, Accounts
from koalapy.agent.lrm.commands import CommandResult, RunCommand, run
from koalapy.model.errors import SiteRejected

CAP_SETGID, CAP_SETUID = 1 << 6, 1 << 7
NO_RULE = re.compile(r"^sudo: .*(password|not allowed|unknown user|effective uid|sudoers)|^Sorry, user", re.MULTILINE)
"""What sudo says when it does not run something; what is run speaks for itself."""
LEFT_OUT = ("TMPDIR", "MAIL", "XDG_RUNTIME_DIR")
"""Of the agent's environment: they are its own."""


class Way(StrEnum):
    SETUID = "setuid"
    SUDO = "sudo"
    NONE = "none"


def way_here() -> Way:
    """By which this process may act as others, as far as can be told without trying."""
    if os.geteuid() == 0 or _may_change_account():
        return Way.SETUID
    return Way.SUDO if shutil.which("sudo") else Way.NONE


def _may_change_account() -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    wanted = CAP_SETGID | CAP_SETUID
    return found is not None and int(found[1], 16) & wanted == wanted


class RunAs:
    """Makes commands that run as somebody, and runs them. ``SiteError`` for who may not run anything here."""

    def __init__(self, accounts: Accounts, way: Way | None = None, run_command: RunCommand = run) -> None:
        self.accounts, self._run_command = accounts, run_command
        self.way = way or (way_here() if accounts.are_many else Way.NONE)

    async def run(self, user: str, *argv: str, environment: Mapping[str, str], **options: Any) -> CommandResult:
        """As ``commands.run``, by that account; as the agent itself where none is named."""
        if not user:
            return await self._run_command(*argv, environment=environment, **options)
        account = await self.accounts.find(user)
        command = self.command(account, argv, environment.get("PATH"))
        answer = await self._run_command(*command, environment=environment_of(account, environment), **options)
        if self.way is Way.SUDO and answer.code != 0 and NO_RULE.search(answer.errors):
            raise self._no_rule(argv[0], user, answer.error_line)
        return answer

    def command(self, account: Account, argv: Sequence[str], path: str | None = None) -> list[str]:
        """The command line by which an account runs a command; of ``path`` the folders in which it is looked for."""
        if self.way is Way.SETUID:
            groups = ",".join(map(str, sorted({account.gid, *account.groups})))
            own = ["--reuid", str(account.uid), "--regid", str(account.gid), "--groups", groups]
            return [_program("setpriv"), *own, "--inh-caps", "-all", "--ambient-caps", "-all", "--", *argv]
        if self.way is Way.SUDO:
            program = shutil.which(argv[0], path=path)
            if program is None:
                raise SiteRejected(f"there is no {argv[0]} on the agent's PATH", fault="site")
            return [_program("sudo"), "-n", "-u", account.name, "--", program, *argv[1:]]
        raise SiteRejected(
            "this agent may act for nobody: it is not root, has no CAP_SETUID and CAP_SETGID, and there is no sudo",
            hint="see docs/clusters.md, Whose processes",
            fault="site",
        )

    def _no_rule(self, program: str, user: str, line: str) -> SiteRejected:
        return SiteRejected(
            f"sudo does not let this agent run {program} as {user}: {line.removeprefix('sudo: ')}",
            hint="see docs/clusters.md, Whose processes, for the rules that it needs",
            fault="site",
        )


def _program(name: str) -> str:
    """Of the agent's own path: what is run by it may have another."""
    return shutil.which(name) or f"/usr/bin/{name}"


def plain(*argv: str) -> list[str]:
    """A command without what this agent may beyond its account: for what speaks with other sites."""
    if os.geteuid() == 0 or not _may_change_account():
        return [*argv]
    return [_program("setpriv"), "--inh-caps", "-all", "--ambient-caps", "-all", "--", *argv]


def environment_of(account: Account, given: Mapping[str, str]) -> dict[str, str]:
    """What is inherited, with what is the account's own in place of what is the agent's."""
    kept = {name: value for name, value in given.items() if name not in LEFT_OUT}
    own = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell or "/bin/sh"}
    return kept | own
