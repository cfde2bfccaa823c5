"""Which account of this host a job is to run as; looked up anew each time, and refused where anything is odd."""

import asyncio
import os
import pwd
import re
from collections.abc import Callable
from dataclasses import dataclass

from koalapy.agent.core.settings import SiteSettings
from koalapy.model.errors import SiteRejected, SiteUnavailable

PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""What may go into a path and onto a command line; no number, or it might be taken for one."""
CLOSED = ("nologin", "false")
"""Shells of accounts that nobody is to run anything as."""


@dataclass(frozen=True, slots=True)
class Account:
    """As the host's name service has it; ``groups`` are all that it is in."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def by_name_service(name: str) -> Account | None:
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
        self, cluster: str, settings: SiteSettings, lookup: Callable[[str], Account | None] = by_name_service
    ) -> None:
        self._cluster, self._identity, self._min_uid = cluster, settings.identity, settings.min_uid
        self._lookup = lookup
        self.own_uid = os.geteuid()

    @property
    def are_many(self) -> bool:
        """Whether jobs run as accounts other than the agent's own."""
        return self._identity == "mapped"

    @property
    def acts_as_root(self) -> bool:
        """Whether what the agent ran for itself would be root's, where jobs are others'."""
        return self.are_many and self.own_uid == 0

    def acting(self, local_user: str) -> str:
        """As whom somebody's job is to be handled; empty for the agent's own account. To be admitted before it runs."""
        if self._identity == "service":
            return ""
        return "" if self._identity == "own" and local_user == own_name(self.own_uid) else local_user

    def admit(self, user: str) -> None:
        """Refuse what cannot be, before anything is looked up."""
        if self._identity == "own" and user:
            raise self._refused(
                f"jobs on {self._cluster} run as {own_name(self.own_uid)} alone, and not as {user!r}",
                f"only the jobs of clusters.{self._cluster}.user may run there",
            )
        if self._identity == "mapped" and not user:
            raise self._refused(
                f"{self._cluster} runs jobs as their owners' accounts, and nobody said which that is",
                f"give the owner an account on {self._cluster} under users.NAME.accounts",
            )

    async def find(self, user: str) -> Account:
        """As ``find_now``, which blocks for as long as the host's name service does."""
        return await asyncio.to_thread(self.find_now, user)

    def find_now(self, user: str) -> Account:
        """The account of that name, that people's jobs may run as; ``SiteUnavailable`` when nobody can say."""
        self.admit(user)
        if not self.are_many:
            raise self._refused(f"{self._cluster} runs jobs as one account, and not as {user!r}", "see its identity")
        if not PLAIN.fullmatch(user) or user.isdecimal():
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
        return SiteRejected(message, field="account", hint=hint, fault="unsuitable")


def own_name(uid: int) -> str:
    """For people, and to be compared with what a daemon says."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
