"""People, and the accounts that they have on the clusters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from koalapy.model.identity import Role
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class User:
    """Somebody whom the configuration names."""

    accounts: Mapping[ClusterName, str] = field(default_factory=dict)
    role: Role = Role.USER
    groups: tuple[str, ...] = ()


class Users:
    """Who is who on which cluster. Somebody without a name of their own is called ``ACCOUNT@CLUSTER``."""

    def __init__(self, named: Mapping[str, User], unmapped: Collection[ClusterName] = ()) -> None:
        """``unmapped``: clusters whose accounts may come though nobody has named them.

        ``ValueError`` when an account is given to two people, or a name looks like that of an unmapped account.
        """
        self._named = named
        self._unmapped = frozenset(unmapped)
        self._people: dict[tuple[ClusterName, str], str] = {}
        for name, user in named.items():
            if "@" in name:
                raise ValueError(f"{name}: a name with an @ is that of an account which nobody is mapped to")
            for cluster, account in user.accounts.items():
                other = self._people.setdefault((cluster, account), name)
                if other != name:
                    raise ValueError(f"{account} on {cluster} is given to both {other} and {name}")

    def user_of(self, cluster: ClusterName, account: str) -> str | None:
        """Whose account it is; None when accounts that belong to nobody may not come from there."""
        person = self._people.get((cluster, account))
        return person or (f"{account}@{cluster}" if cluster in self._unmapped else None)

    def account_of(self, user: str, cluster: ClusterName) -> str | None:
        """What somebody is called on a cluster; None where they have no account."""
        if (named := self._named.get(user)) is not None:
            return named.accounts.get(cluster)
        account, at, of = user.rpartition("@")
        is_known_otherwise = (cluster, account) in self._people
        return account if at and of == cluster and cluster in self._unmapped and not is_known_otherwise else None

    def role_of(self, user: str) -> Role:
        return self._named[user].role if user in self._named else Role.USER

    def groups_of(self, user: str) -> tuple[str, ...]:
        return self._named[user].groups if user in self._named else ()
