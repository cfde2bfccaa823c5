"""What users and groups may have at most, and what is said to who asks for more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, NoReturn

from annotated_types import Ge, Gt

from koalapy.model.errors import LimitReached, NeverAllowed
from koalapy.model.measurement import Finite
from koalapy.model.wording import format_bytes

DAY = 86400.0
MAX_REMEMBERED_USERS = 10_000
DEFAULT_HINT = "ask the operators of this daemon for more; koala limits shows what there is"
ScopeKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class UserLimits:
    """Of one user, or of all members of a group together; what is left out is not limited."""

    queued_jobs: Annotated[int, Ge(0)] | None = None
    """Jobs that wait or are held."""
    nodes: Annotated[int, Ge(0)] | None = None
    """Nodes at once."""
    node_hours_per_day: Annotated[Finite, Ge(0)] | None = None
    """Node-hours in 24 hours; a job that runs counts with all that its walltime allows."""
    bundle_bytes: Annotated[int, Ge(0)] | None = None
    """Bytes sent along with jobs that are kept."""
    result_bytes: Annotated[int, Ge(0)] | None = None
    """Bytes brought back by jobs that are kept."""
    requests_per_second: Annotated[Finite, Gt(0)] | None = None
    """Requests; five seconds' worth may come at once."""


UNLIMITED = UserLimits()
NAMES = tuple(own.name for own in fields(UserLimits))


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """The section ``limits``: of each user, of some users instead, and of groups, whose members share them."""

    default: UserLimits = UNLIMITED
    users: dict[str, UserLimits] = field(default_factory=dict)
    """What is left out of a user's is that of ``default``."""
    groups: dict[str, UserLimits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose limits: those of a user, or of a group of which he is."""

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
    """What was asked for beyond a limit."""

    scope: Scope
    name: str
    limit: float
    used: float
    requested: float
    contact: str

    @property
    def text(self) -> str:
        limit, used, asked = (_amount(self.name, value) for value in (self.limit, self.used, self.requested))
        have = f"{used} {'is' if self.used == 1 else 'are'} in use and {asked} more asked for"
        return f"the limit {self.name} of {self.scope.display_name} is {limit}: {have}"

    @property
    def hint(self) -> str:
        return self.contact or DEFAULT_HINT

    @property
    def waiting_reason(self) -> str:
        """Of a job that waits for it."""
        return f"{self.text}; {self.hint}"

    @property
    def value(self) -> dict[str, float]:
        return {"limit": self.limit, "used": self.used, "asked": self.requested}

    def raise_error(self) -> NoReturn:
        """``NeverAllowed`` where that alone is more than the limit, else ``LimitReached``."""
        kind = NeverAllowed if self.requested > self.limit else LimitReached
        raise kind(self.text, field=f"limits.{self.name}", value=self.value, hint=self.hint)


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Nodes that somebody had for a while, in seconds since the epoch."""

    owner: str
    nodes: int
    start: float
    end: float


def _amount(name: str, value: float) -> str:
    return format_bytes(int(value)) if name.endswith("_bytes") else f"{value:.12g}"


class Limits:
    """Knows whose limits count for whom."""

    def __init__(
        self,
        settings: LimitSettings | None = None,
        groups_of: Callable[[str], Sequence[str]] = lambda _: (),
        contact: str = "",
    ) -> None:
        """``groups_of`` says of which groups a user is; ``contact`` where more is asked for."""
        self.settings = settings or LimitSettings()
        self._groups_of = groups_of
        self.contact = contact
        self._known: dict[str, tuple[Scope, ...]] = {}
        every = [self.settings.default, *self.settings.users.values(), *self.settings.groups.values()]
        self._limited = frozenset(name for name in NAMES for each in every if getattr(each, name) is not None)

    def has_any(self, *names: str) -> bool:
        """Whether anybody has a limit of one of these names."""
        return not self._limited.isdisjoint(names)

    def scopes(self, user: str) -> tuple[Scope, ...]:
        """His own limits, and those of his groups; none where nothing is limited."""
        if not self._limited:
            return ()
        if (known := self._known.get(user)) is None:
            if len(self._known) >= MAX_REMEMBERED_USERS:
                self._known.clear()
            known = self._known[user] = tuple(self._scopes(user))
        return known

    def _scopes(self, user: str) -> list[Scope]:
        settings = self.settings
        own = settings.users.get(user, UNLIMITED)
        given = {name: value for name in NAMES if (value := getattr(own, name)) is not None}
        found = [Scope(("user", user), replace(settings.default, **given))]
        found += [
            Scope(("group", group), settings.groups[group])
            for group in self._groups_of(user)
            if group in settings.groups
        ]
        return [scope for scope in found if scope.limits != UNLIMITED]

    def applies_to(self, scope: Scope, user: str) -> bool:
        """Whether what a user has counts there."""
        return scope.key[1] == user if scope.key[0] == "user" else scope.key[1] in self._groups_of(user)

    def check(self, user: str, name: str, asked: float) -> None:
        """``NeverAllowed`` for what is more by itself than somebody may ever have."""
        for scope in self.scopes(user):
            if excess := self.find_excess(scope, name, 0, asked):
                excess.raise_error()

    def find_excess(self, scope: Scope, name: str, used: float, asked: float) -> Excess | None:
        """None where there is room for what is asked for."""
        limit = getattr(scope.limits, name)
        if limit is None or used + asked <= limit:
            return None
        return Excess(scope, name, limit, used, asked, self.contact)
