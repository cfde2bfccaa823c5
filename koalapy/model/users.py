"""Users, their accounts on the clusters, and the sharing of nodes between their home sites."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from koalapy.model.identity import Role
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list


@dataclass(frozen=True, slots=True)
class User:
    """A user defined in the configuration."""

    accounts: Mapping[ClusterName, str] = field(default_factory=dict)
    role: Role = Role.USER
    groups: tuple[str, ...] = ()
    home: ClusterName = ""
    """The home site; empty: the only cluster on which the user has an account."""


class Users:
    """The users and their accounts. The user of an account without a configured user is ``ACCOUNT@CLUSTER``."""

    def __init__(self, configured: Mapping[str, User], unmapped: Collection[ClusterName] = ()) -> None:
        """Check that each account has one user. ``unmapped`` clusters also admit accounts without a configured user.

        Raise ``ValueError`` if two users have the same account, or a user name contains ``@``.
        """
        self.configured = configured
        self.unmapped = frozenset(unmapped)
        self._users_by_account: dict[tuple[ClusterName, str], str] = {}
        for name, user in configured.items():
            if "@" in name:
                raise ValueError(f"user name {name} contains @, which marks accounts without a configured user")
            for cluster, account in user.accounts.items():
                first_user = self._users_by_account.setdefault((cluster, account), name)
                if first_user != name:
                    raise ValueError(f"account {account} on {cluster} belongs to both {first_user} and {name}")

    def configured_user_of(self, cluster: ClusterName, account: str) -> str | None:
        """Return the configured user of an account; None if there is none."""
        return self._users_by_account.get((cluster, account))

    def user_of(self, cluster: ClusterName, account: str) -> str | None:
        """Return the user of an account; None if it has no configured user and the cluster is not ``unmapped``."""
        user = self.configured_user_of(cluster, account)
        return user or (f"{account}@{cluster}" if cluster in self.unmapped else None)

    def account_of(self, user: str, cluster: ClusterName) -> str | None:
        """Return the account of a user on a cluster; None if the user has none."""
        if (configured := self.configured.get(user)) is not None:
            return configured.accounts.get(cluster)
        account, at_sign, account_cluster = user.rpartition("@")
        has_configured_user = (cluster, account) in self._users_by_account
        is_unmapped = at_sign and account_cluster == cluster and cluster in self.unmapped and not has_configured_user
        return account if is_unmapped else None

    def sites_of(self, user: str) -> Sequence[ClusterName]:
        """Return the clusters on which a user has an account, the home site first."""
        configured = self.configured.get(user)
        if configured is None:
            cluster = user.rpartition("@")[2]
            return (cluster,) if self.account_of(user, cluster) else ()
        return tuple(dict.fromkeys([*filter(None, [configured.home]), *sorted(configured.accounts)]))

    def home_of(self, user: str) -> ClusterName:
        """Return the home site of a user; empty if it is not known."""
        configured, sites = self.configured.get(user, User()), self.sites_of(user)
        return configured.home or (sites[0] if len(sites) == 1 else "")

    def configured_role(self, user: str) -> Role:
        """Return the role that the setting ``users`` gives a user; other sources may give a higher one."""
        return self.configured[user].role if user in self.configured else Role.USER

    def groups_of(self, user: str) -> tuple[str, ...]:
        """Return the configured groups of a user."""
        return self.configured[user].groups if user in self.configured else ()


@dataclass(frozen=True, slots=True)
class Domain:
    """The account under which jobs run on a cluster: the user's own, a service account, or a mapped one."""

    identity: Literal["own", "service", "mapped"] = "service"
    user: str = ""
    """The only user with jobs there, for the identity ``own``."""


class Accounts:
    """The clusters on which the jobs of an owner may run, and the accounts that they run under."""

    def __init__(self, users: Users | None = None, domains: Mapping[ClusterName, Domain] | None = None) -> None:
        """Store the users and domains. Clusters without a domain run all jobs under a service account."""
        self._users = users or Users({})
        self._domains = {name: domain for name, domain in (domains or {}).items() if domain.identity != "service"}
        self._closed: dict[str, frozenset[ClusterName]] = {}
        """Cached results of ``closed_to`` by owner; users and domains do not change while a daemon runs."""

    def sites_of(self, owner: str) -> Sequence[ClusterName]:
        """Return the clusters on which an owner has an account, the home site first."""
        return self._users.sites_of(owner)

    def home_of(self, owner: str) -> ClusterName:
        """Return the home site of an owner; empty if it is not known, or the owner may not use it."""
        home = self._users.home_of(owner)
        return "" if home in self.closed_to(owner) else home

    def identity_of(self, cluster: ClusterName) -> str:
        """Return ``own``, ``service`` or ``mapped``: the kind of account under which jobs run on a cluster."""
        return self._domains.get(cluster, SERVICE).identity

    def owner_of(self, cluster: ClusterName) -> str:
        """Return the only user of a cluster; empty if the cluster serves several users."""
        return self._domains.get(cluster, SERVICE).user

    def closed_to(self, owner: str) -> frozenset[ClusterName]:
        """Return the clusters where jobs of an owner may not run. Called at every placement try."""
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
        """Return why jobs of an owner may not run on a cluster; empty if they may."""
        domain = self._domains.get(cluster, SERVICE)
        if domain.identity == "own" and (not domain.user or owner != domain.user):
            return f"{cluster} is {domain.user}'s own" if domain.user else f"{cluster} has no user"
        if domain.identity == "mapped" and not self._users.account_of(owner, cluster):
            return f"{owner} has no account on {cluster}"
        return ""

    def local_user(self, owner: str, cluster: ClusterName) -> str:
        """Return the account under which a job runs; empty for the account of the agent."""
        if self._domains.get(cluster, SERVICE).identity != "mapped":
            return ""
        return self._users.account_of(owner, cluster) or ""


SERVICE = Domain()
NOWHERE: frozenset[ClusterName] = frozenset()
MAX_OWNERS = 10_000
"""Maximum number of owners with cached closed clusters."""


def owner_rejection_reason(clusters: Collection[ClusterName]) -> str:
    """Return why a job may not run on these clusters.

    The text does not name the owner, so that it is the same for all owners.
    """
    return f"its owner may not use {format_list(sorted(clusters))}"


SharingMode = Literal["ordinary", "independent", "feasible"]


class Sharing:
    """The sharing rules by home site; they do not change while a daemon runs."""

    def __init__(
        self,
        mode: SharingMode = "ordinary",
        speed_threshold: float = 0.0,
        speeds: Mapping[ClusterName, float] | None = None,
    ) -> None:
        """``speeds``: of all clusters; a job may not use one slower than ``speed_threshold`` times its home site."""
        self._mode, self._threshold, self._speeds = mode, speed_threshold, dict(speeds or {})
        self._closed = {home: closed for home in self._speeds if (closed := self._closed_at(home))}
        sites = [] if mode == "ordinary" else sorted(self._speeds)
        self._sections = {site: place for place, site in enumerate(sites)}
        self.reclaims = mode == "feasible"
        """Whether sites reclaim nodes for their own users."""

    def section_of(self, home: ClusterName) -> int:
        """Return the section of the placement queue for jobs of a home site.

        Sections are served in order: those of the sites by name, then that of jobs without a home site.
        """
        return self._sections.get(home, len(self._sections))

    def site_of(self, home: ClusterName) -> ClusterName:
        """Return the home site if it has a section of the placement queue; otherwise an empty text."""
        return home if home in self._sections else ""

    def reclaiming_site(self, home: ClusterName) -> ClusterName:
        """Return the cluster that may reclaim nodes for jobs of a home site; empty if there is none."""
        return home if self.reclaims and home in self._speeds else ""

    def closed_to(self, home: ClusterName) -> frozenset[ClusterName]:
        """Return the clusters where jobs of a home site may not run. Called at every placement try."""
        if not home:
            return NOWHERE
        if self._mode == "independent" and home not in self._speeds:
            return frozenset(self._speeds)
        return self._closed.get(home, NOWHERE)

    def _closed_at(self, home: ClusterName) -> frozenset[ClusterName]:
        """Return the clusters on which jobs of a home site may not run: all others, or too slow ones."""
        if self._mode == "independent":
            return frozenset(self._speeds) - {home}
        minimum = self._threshold * self._speeds[home]
        return frozenset(name for name, speed in self._speeds.items() if speed < minimum and name != home)

    def rejection_reason(self, home: ClusterName, cluster: ClusterName) -> str:
        """Return why jobs of a home site may not run on a cluster; empty if they may."""
        if cluster not in self.closed_to(home):
            return ""
        if self._mode == "independent":
            return f"its home site is {home}, and sharing is independent"
        minimum = self._threshold * self._speeds[home]
        return f"its speed is {self._speeds[cluster]:g}, and a job of {home} is to have at least {minimum:g}"

    def home_rejection_reason(self, clusters: Collection[ClusterName]) -> str:
        """Return why a job may not run on these clusters.

        The text does not name the home site, so that it is the same for many jobs.
        """
        names = sorted(clusters)
        if self._mode == "independent":
            return (
                f"sharing is independent: {format_list(names)} {'is' if len(names) == 1 else 'are'} not its home site"
            )
        return f"{format_list(names)} {'is' if len(names) == 1 else 'are'} too slow beside its home site"
