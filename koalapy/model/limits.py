"""Limits of users and groups, and the errors for requests that exceed them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, NamedTuple, NoReturn

from annotated_types import Ge, Gt

from koalapy.model.errors import LimitReached, NeverAllowed
from koalapy.model.measurement import Finite
from koalapy.model.wording import format_bytes

DAY = 86400.0
MAX_REMEMBERED_USERS = 10_000
DEFAULT_HINT = "ask the operators of this daemon for more; koala limits shows what there is"
ScopeKey = tuple[str, str]
Weight = Annotated[Finite, Ge(0)]


@dataclass(frozen=True, slots=True)
class UserLimits:
    """The limits of one user, or of all members of a group together; None: not limited."""

    queued_jobs: Annotated[int, Ge(0)] | None = None
    """Queued or held jobs."""
    nodes: Annotated[int, Ge(0)] | None = None
    """Nodes in use at once."""
    node_hours_per_day: Annotated[Finite, Ge(0)] | None = None
    """Node-hours within 24 hours; a running job counts with its whole walltime."""
    bundle_bytes: Annotated[int, Ge(0)] | None = None
    """Bytes of stored bundles."""
    result_bytes: Annotated[int, Ge(0)] | None = None
    """Bytes of stored results."""
    requests_per_second: Annotated[Finite, Gt(0)] | None = None
    """Requests per second; a burst may have the requests of five seconds."""


UNLIMITED = UserLimits()
NAMES = tuple(limit.name for limit in fields(UserLimits))


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """The section ``limits``: limits of each user, of particular users, and of groups, which all members share."""

    default: UserLimits = UNLIMITED
    users: dict[str, UserLimits] = field(default_factory=dict)
    """User -> limits. Omitted limits are those of ``default``."""
    groups: dict[str, UserLimits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scope:
    """A user or group with its limits."""

    key: ScopeKey
    limits: UserLimits

    @property
    def is_group(self) -> bool:
        return self.key[0] == "group"

    @property
    def display_name(self) -> str:
        return f"the group {self.key[1]}" if self.is_group else self.key[1]


@dataclass(frozen=True, slots=True)
class Excess:
    """A request that exceeds a limit."""

    scope: Scope
    name: str
    limit: float
    used: float
    requested: float
    contact: str

    @property
    def text(self) -> str:
        limit, used, requested = (_amount(self.name, value) for value in (self.limit, self.used, self.requested))
        have = f"{used} {'is' if self.used == 1 else 'are'} in use and {requested} more asked for"
        return f"the limit {self.name} of {self.scope.display_name} is {limit}: {have}"

    @property
    def hint(self) -> str:
        return self.contact or DEFAULT_HINT

    @property
    def waiting_reason(self) -> str:
        """Return the reason for which a job waits until less is in use."""
        return f"{self.text}; {self.hint}"

    @property
    def value(self) -> dict[str, float]:
        return {"limit": self.limit, "used": self.used, "asked": self.requested}

    def raise_error(self) -> NoReturn:
        """Raise ``NeverAllowed`` if the request exceeds the limit even without other use, else ``LimitReached``."""
        kind = NeverAllowed if self.requested > self.limit else LimitReached
        raise kind(self.text, field=f"limits.{self.name}", value=self.value, hint=self.hint)


@dataclass(frozen=True, slots=True)
class FairShareSettings:
    """The section ``fair_share``: weights of users and groups in the order ``fair-share`` of waiting jobs."""

    half_life: Annotated[Finite, Ge(60.0)] = 7 * DAY
    """Seconds after which past use counts half."""
    users: dict[str, Weight] = field(default_factory=dict)
    """User -> weight; 1 for all others. With 0 their jobs come after those of all users with a weight."""
    groups: dict[str, Weight] = field(default_factory=dict)
    """Group -> weight. Its members share what it has; a user of several groups belongs to the first of them."""


@dataclass(frozen=True, slots=True)
class ShareWeight:
    """The weight of a user that an operator has set, in place of the configured one."""

    user: str
    weight: Weight | None
    """None: as configured again."""
    by: str
    reason: str
    at: float
    """In seconds since the epoch."""


class Charge(NamedTuple):
    """Use of nodes by jobs that have ended, as charged in fair share."""

    owner: str
    node_seconds: float
    at: float
    """The time of its end, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ShareLine:
    """The use of a user, or of all members of a group, compared with the target."""

    user: str
    """Empty in the line of a group."""
    group: str
    """Empty for users without a group that has a weight."""
    weight: float
    target: float
    """The fraction of the grid that its weight gives, among all users and groups with use."""
    share: float
    """The fraction that it had, of the decayed use of all."""
    node_hours: float
    """Its decayed use."""
    nodes: int
    """Nodes in use now."""
    set_weight: ShareWeight | None = None
    """Who set the weight and why; None: it is the configured one."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """A number of nodes that a user had from ``start`` to ``end``, in seconds since the epoch."""

    owner: str
    nodes: int
    start: float
    end: float
    part: float = 1.0
    """The part of each node, if the job shared them."""


def _amount(name: str, value: float) -> str:
    return format_bytes(int(value)) if name.endswith("_bytes") else f"{value:.12g}"


class Limits:
    """A resolver of the limits that apply to a user."""

    def __init__(
        self,
        settings: LimitSettings | None = None,
        groups_of: Callable[[str], Sequence[str]] = lambda _: (),
        contact: str = "",
    ) -> None:
        """``groups_of`` returns the groups of a user; ``contact`` is the hint of the errors."""
        self.settings = settings or LimitSettings()
        self._groups_of = groups_of
        self.contact = contact
        self._scopes_by_user: dict[str, tuple[Scope, ...]] = {}
        all_limits = [self.settings.default, *self.settings.users.values(), *self.settings.groups.values()]
        self._limited = frozenset(name for name in NAMES for limits in all_limits if getattr(limits, name) is not None)

    def has_any(self, *names: str) -> bool:
        """Return whether any user or group has one of these limits."""
        return not self._limited.isdisjoint(names)

    def scopes(self, user: str) -> tuple[Scope, ...]:
        """Return the limits of a user and of the user's groups; empty if nothing is limited."""
        if not self._limited:
            return ()
        if (scopes := self._scopes_by_user.get(user)) is None:
            if len(self._scopes_by_user) >= MAX_REMEMBERED_USERS:
                self._scopes_by_user.clear()
            scopes = self._scopes_by_user[user] = self._resolve_scopes(user)
        return scopes

    def _resolve_scopes(self, user: str) -> tuple[Scope, ...]:
        """Return the limits of a user, which override the defaults, and those of the user's groups."""
        settings = self.settings
        user_limits = settings.users.get(user, UNLIMITED)
        overrides = {name: value for name in NAMES if (value := getattr(user_limits, name)) is not None}
        scopes = [Scope(("user", user), replace(settings.default, **overrides))]
        scopes += [
            Scope(("group", group), settings.groups[group])
            for group in self._groups_of(user)
            if group in settings.groups
        ]
        return tuple(scope for scope in scopes if scope.limits != UNLIMITED)

    def applies_to(self, scope: Scope, user: str) -> bool:
        """Return whether the use of a user counts toward the limits of a scope."""
        return scope.key[1] == user if scope.key[0] == "user" else scope.key[1] in self._groups_of(user)

    def check(self, user: str, name: str, requested: float) -> None:
        """Raise ``NeverAllowed`` if a request exceeds a limit of the user or a group, even without other use."""
        for scope in self.scopes(user):
            if excess := self.find_excess(scope, name, 0, requested):
                excess.raise_error()

    def find_excess(self, scope: Scope, name: str, used: float, requested: float) -> Excess | None:
        """Return by what a request exceeds a limit of a scope; None if it does not."""
        limit = getattr(scope.limits, name)
        if limit is None or used + requested <= limit:
            return None
        return Excess(scope, name, limit, used, requested, self.contact)
