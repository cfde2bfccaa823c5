"""People, and the accounts that they have on the clusters."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from koalapy.model.identity import Role
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list


@dataclass(frozen=True, slots=True)
class User:
    """Somebody whom the configuration names."""

    accounts: Mapping[ClusterName, str] = field(default_factory=dict)
    role: Role = Role.USER
    groups: tuple[str, ...] = ()
    home: ClusterName = ""
    """Whose user they count as; empty: of the one cluster on which they have an account, if it is one."""


class Users:
    """Who is who on which cluster. Somebody without a name of their own is called ``ACCOUNT@CLUSTER``."""

    def __init__(self, named: Mapping[str, User], unmapped: Collection[ClusterName] = ()) -> None:
        """``unmapped``: clusters whose accounts may come though nobody has named them.

        ``ValueError`` when an account is given to two people, or a name looks like that of an unmapped account.
        """
        self.configured = named
        self.unmapped = frozenset(unmapped)
        self._people: dict[tuple[ClusterName, str], str] = {}
        for name, user in named.items():
            if "@" in name:
                raise ValueError(f"{name}: a name with an @ is that of an account which nobody is mapped to")
            for cluster, account in user.accounts.items():
                other = self._people.setdefault((cluster, account), name)
                if other != name:
                    raise ValueError(f"{account} on {cluster} is given to both {other} and {name}")

    def configured_user_of(self, cluster: ClusterName, account: str) -> str | None:
        """Who of those that the configuration names has an account; None when nobody has."""
        return self._people.get((cluster, account))

    def user_of(self, cluster: ClusterName, account: str) -> str | None:
        """Whose account it is; None when accounts that belong to nobody may not come from there."""
        person = self.configured_user_of(cluster, account)
        return person or (f"{account}@{cluster}" if cluster in self.unmapped else None)

    def account_of(self, user: str, cluster: ClusterName) -> str | None:
        """What somebody is called on a cluster; None where they have no account."""
        if (named := self.configured.get(user)) is not None:
            return named.accounts.get(cluster)
        account, at, of = user.rpartition("@")
        is_known_otherwise = (cluster, account) in self._people
        return account if at and of == cluster and cluster in self.unmapped and not is_known_otherwise else None

    def sites_of(self, user: str) -> Sequence[ClusterName]:
        """The clusters that somebody is a user of, as far as is known, the own home first where there is one."""
        named = self.configured.get(user)
        if named is None:
            cluster = user.rpartition("@")[2]
            return (cluster,) if self.account_of(user, cluster) else ()
        return tuple(dict.fromkeys([*filter(None, [named.home]), *sorted(named.accounts)]))

    def home_of(self, user: str) -> ClusterName:
        """Whose user somebody counts as; empty where nobody knows."""
        named, sites = self.configured.get(user, User()), self.sites_of(user)
        return named.home or (sites[0] if len(sites) == 1 else "")

    def configured_role(self, user: str) -> Role:
        """Return the role that the setting ``users`` gives a user; other sources may give a higher one."""
        return self.configured[user].role if user in self.configured else Role.USER

    def groups_of(self, user: str) -> tuple[str, ...]:
        return self.configured[user].groups if user in self.configured else ()


@dataclass(frozen=True, slots=True)
class Domain:
    """Whose processes the jobs on a cluster are."""

    identity: Literal["own", "service", "mapped"] = "service"
    user: str = ""
    """Of the identity ``own``: who alone has jobs there."""


class Accounts:
    """Where jobs of an owner may run, and as which account."""

    def __init__(self, users: Users | None = None, domains: Mapping[ClusterName, Domain] | None = None) -> None:
        """Clusters of which ``domains`` says nothing are one account's, for all."""
        self._users = users or Users({})
        self._domains = {name: domain for name, domain in (domains or {}).items() if domain.identity != "service"}
        self._closed: dict[str, frozenset[ClusterName]] = {}
        """By owner; both do not change while a daemon lives."""

    def sites_of(self, owner: str) -> Sequence[ClusterName]:
        """The clusters that an owner is a user of, as far as is known."""
        return self._users.sites_of(owner)

    def home_of(self, owner: str) -> ClusterName:
        """The cluster whose user an owner counts as; empty where nobody knows, or the owner may not use it."""
        home = self._users.home_of(owner)
        return "" if home in self.closed_to(owner) else home

    def identity_of(self, cluster: ClusterName) -> str:
        """Whose processes its jobs are to be."""
        return self._domains.get(cluster, SERVICE).identity

    def owner_of(self, cluster: ClusterName) -> str:
        """Whose alone a cluster is; empty when it is not somebody's own."""
        return self._domains.get(cluster, SERVICE).user

    def closed_to(self, owner: str) -> frozenset[ClusterName]:
        """The clusters where jobs of an owner may not run; asked at every try."""
        if not self._domains:
            return NOWHERE
        closed = self._closed.get(owner)
        if closed is None:
            if len(self._closed) >= MAX_OWNERS:
                self._closed.clear()
            closed = self._closed[owner] = frozenset(
                name for name in self._domains if self.rejection_reason(owner, name)
            )
        return closed

    def rejection_reason(self, owner: str, cluster: ClusterName) -> str:
        """Why jobs of an owner may not run on a cluster; empty when they may."""
        domain = self._domains.get(cluster, SERVICE)
        if domain.identity == "own" and (not domain.user or owner != domain.user):
            return f"{cluster} is {domain.user}'s own" if domain.user else f"{cluster} is nobody's"
        if domain.identity == "mapped" and not self._users.account_of(owner, cluster):
            return f"{owner} has no account on {cluster}"
        return ""

    def local_user(self, owner: str, cluster: ClusterName) -> str:
        """The account that a job is to run as; empty where that is the agent's own."""
        if self._domains.get(cluster, SERVICE).identity != "mapped":
            return ""
        return self._users.account_of(owner, cluster) or ""


SERVICE = Domain()
NOWHERE: frozenset[ClusterName] = frozenset()
MAX_OWNERS = 10_000
"""Of whom it is remembered where they may not run jobs."""


def owner_rejection_reason(clusters: Collection[ClusterName]) -> str:
    """Why a job does not go to these, without a name: owners who may use the same clusters share what is said."""
    return f"its owner may not use {format_list(sorted(clusters))}"
