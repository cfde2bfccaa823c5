"""Who somebody is by the token that they show: the daemon's own, the configuration's, and those that were asked for."""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

import structlog

from koalapy.daemon.engine.database import run_in_database
from koalapy.model.errors import (
    ConflictError,
    ForbiddenError,
    LeaseLost,
    NotFoundError,
    ProblemCode,
    StoreUnavailable,
    TokenRejected,
)
from koalapy.model.identity import Identity, Role, Verified, highest_role, is_provider_token
from koalapy.model.request import ClusterName
from koalapy.model.users import Users
from koalapy.ports import StoredToken, TokenStore

log = structlog.get_logger()

PREFIX = "koala_"
"""By which tokens are found where they should not be, such as in a repository."""
DEFAULT_SPAN = 30 * 86400.0
"""Seconds for which a token holds whose order does not say."""
RETENTION = 7 * 86400.0
"""Seconds for which a token is listed that has expired, or was revoked."""
MAX_TOKENS_OF_ONE = 1000
"""Tokens that hold, of one user."""
LAST_USE_INTERVAL = 60.0
"""Seconds between two times that it is stored when tokens were used."""

ROLES = frozenset(str(role) for role in Role)

End = Callable[[], None]


class Verifier(Protocol):
    """Knows the tokens of an OpenID provider."""

    def known(self, token: str) -> Verified | None:
        """Of one that was verified before, and holds."""

    async def verify(self, token: str) -> Verified:
        """``TokenRejected``, and ``SiteUnavailable`` while that cannot be told."""

    def role_of(self, user: str) -> Role:
        """Return the highest role that its tokens may give a user."""


def agent_of(cluster: ClusterName) -> str:
    """Who has made a token that is a login from a cluster."""
    return f"the agent of {cluster}"


def vouched_by(token: StoredToken) -> tuple[str, ClusterName]:
    """The account of a login, and the cluster whose agent vouched for it; both empty of other tokens."""
    account, _, cluster = token.how.rpartition(" on ")
    return (account, cluster) if account and token.created_by == agent_of(cluster) else ("", "")


def digest_of_token(token: str) -> str:
    """How a token is kept; whoever reads that has no token."""
    return sha256(token.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """A token that somebody wants; None of ``expires`` is for ever."""

    user: str
    role: Role
    expires: float | None = DEFAULT_SPAN
    """Seconds from now."""
    note: str = ""


class Identities:
    """Knows tokens by their digests only, so that neither a look at them nor the time that one takes tells a token."""

    def __init__(
        self,
        fixed: Mapping[str, Identity],
        store: TokenStore | None = None,
        users: Users | None = None,
        clock: Callable[[], float] = time.time,
        provider: Verifier | None = None,
        reserved: Collection[str] = (),
        max_tokens: int = MAX_TOKENS_OF_ONE,
    ) -> None:
        """``fixed``: tokens that hold while the daemon lives; ``reserved``: names of the daemon's own, which no other
        source may give to a caller; ``max_tokens``: valid tokens that one user may have."""
        self._max_tokens = max_tokens
        self._provider, self._reserved = provider, frozenset(reserved)
        self._fixed = {digest_of_token(token): identity for token, identity in fixed.items()}
        self._store, self._users, self._clock = store, users or Users({}), clock
        self._stored = {token.id: token for token in (store.tokens() if store else ())}
        self._valid: dict[str, Identity] = {}
        for token in self._stored.values():
            self._admit(token)
        self._last_used: dict[int, float] = {}
        """Uses that are not stored yet."""
        self._open: dict[int, set[End]] = {}
        """What ends with each token."""
        self._changing = asyncio.Lock()
        """Held while tokens are written, so that no later row is overwritten by an earlier one."""

    def role_of(self, user: str) -> Role:
        """Return the highest role that a user has by any source.

        The sources are the settings ``users`` and ``tokens``, stored tokens that hold, the OpenID provider, and the
        names of the daemon's own. An account that no user is mapped to (``ACCOUNT@CLUSTER``) has the role of the user
        of the account's name as well, since it may be the same person's.
        """
        names, now = {user, user.rpartition("@")[0] or user}, self._clock()
        if names & self._reserved:
            return Role.ADMIN
        held = [one for one in self._fixed.values() if one.user in names]
        held += [one for one in self._valid.values() if one.user in names and not _has_expired(one, now)]
        roles = [one.role for one in held] + [self._users.configured_role(name) for name in names]
        if self._provider is not None:
            roles += [self._provider.role_of(name) for name in names]
        return highest_role(roles)

    def _admit(self, token: StoredToken) -> None:
        if token.revoked_at is None and token.role in ROLES:
            how = token.how or f"token {token.id}"
            groups = self._users.groups_of(token.user)
            _, site = vouched_by(token)
            self._valid[token.digest] = Identity(
                token.user, Role(token.role), how, groups, token.id, token.expires_at, site
            )

    def of(self, token: str) -> Identity | None:
        """None when nobody has such a token, or not any more."""
        digest = digest_of_token(token)
        if (fixed := self._fixed.get(digest)) is not None:
            return fixed
        found = self._valid.get(digest)
        if found is None or found.token is None:
            signed = self._provider.known(token) if self._provider and is_provider_token(token) else None
            return self._of_provider(signed) if signed and signed.user not in self._reserved else None
        now = self._clock()
        if _has_expired(found, now):
            return None
        self._last_used[found.token] = now
        return found

    async def verify(self, token: str) -> Identity | None:
        """As ``of``, for one that an OpenID provider may have signed and that is seen for the first time.

        ``TokenRejected``, and ``SiteUnavailable`` while that cannot be told.
        """
        if self._provider is None or not is_provider_token(token):
            return None
        signed = await self._provider.verify(token)
        if signed.user in self._reserved:
            raise TokenRejected(
                f"the user {signed.user} is the daemon's own; map the claim to another one in oidc.users"
            )
        return self._of_provider(signed)

    def _of_provider(self, signed: Verified) -> Identity:
        user = signed.user
        role = highest_role([self._users.configured_role(user), signed.role or Role.USER])
        return Identity(
            user, role, "a token of the OpenID provider", self._users.groups_of(user), None, signed.expires_at
        )

    @contextmanager
    def using(self, identity: Identity, end: End) -> Iterator[None]:
        """While something is open that ``end`` is to end with the token that it was opened by."""
        number, expiry = identity.token, None
        if identity.expires_at is not None:
            expiry = asyncio.get_running_loop().call_later(max(0.0, identity.expires_at - self._clock()), end)
        if number is not None:
            self._open.setdefault(number, set()).add(end)
        try:
            yield
        finally:
            if expiry is not None:
                expiry.cancel()
            if number is not None and (ends := self._open.get(number)) is not None:
                ends.discard(end)
                if not ends:
                    del self._open[number]

    # Making

    async def create(self, order: TokenOrder, by: Identity) -> tuple[StoredToken, str]:
        """A token for who asks, or for anybody where an administrator asks; it is told here and never again.

        Others than administrators get none that can do more, or lasts longer, than the one that they show.
        """
        now = self._clock()
        if order.user in self._reserved and by.user not in self._reserved:
            raise ForbiddenError(
                f"{order.user} is a name of the daemon's own", field="user", value=order.user, hint="give another name"
            )
        expires_at = None if order.expires is None else now + order.expires
        if not by.has_role(Role.ADMIN):
            _check_own(order, by)
            if by.expires_at is not None:
                expires_at = by.expires_at if expires_at is None else min(expires_at, by.expires_at)
        return await self.issue(order.user, order.role, expires_at, by.user, note=order.note, made_by=by.token)

    async def issue(
        self,
        user: str,
        role: Role,
        expires_at: float | None,
        created_by: str,
        *,
        how: str = "",
        note: str = "",
        made_by: int | None = None,
    ) -> tuple[StoredToken, str]:
        """A new token, and what is kept of it; whether it may be had is the caller's matter."""
        if self._store is None:
            raise StoreUnavailable("this daemon keeps no tokens")
        async with self._changing:
            now = self._clock()
            held = sum(self.is_valid(token, now) for token in self._stored.values() if token.user == user)
            if held >= self._max_tokens:
                raise ConflictError(
                    f"{user} has {self._max_tokens} tokens already",
                    field="user",
                    value=user,
                    hint="revoke some",
                    code=ProblemCode.LIMIT_EXCEEDED,
                )
            maker = None if made_by is None else self._stored.get(made_by)
            if made_by is not None and (maker is None or not self.is_valid(maker, now)):
                raise ForbiddenError("the token that was shown holds no longer", hint="show another")
            shown = PREFIX + secrets.token_urlsafe(32)
            number = max(self._stored, default=0) + 1
            token = StoredToken(
                number, digest_of_token(shown), user, str(role), how, note, now, created_by, expires_at, made_by=made_by
            )
            # Known before it is written, so that who revokes the one that was shown meanwhile ends this one, too.
            self._stored[number] = token
            try:
                await run_in_database(self._store.save_tokens, [token])
            except BaseException:
                del self._stored[number]
                raise
            if self._stored[number].revoked_at is not None:
                raise ForbiddenError("the token that was shown holds no longer", hint="show another")
            self._admit(token)
        return token, shown

    # Looking

    @staticmethod
    def is_valid(token: StoredToken, now: float) -> bool:
        return token.revoked_at is None and (token.expires_at is None or token.expires_at > now)

    def list(self, by: Identity, user: str | None = None, *, every: bool = False) -> Sequence[StoredToken]:
        """Those that hold, or ``every`` one that is known: all for administrators, and for others their own."""
        now = self._clock()
        if not by.has_role(Role.ADMIN):
            user = by.user if user in (None, by.user) else ""
        chosen = (token for token in self._stored.values() if user in (None, token.user))
        return [self._with_last_use(token) for token in chosen if every or self.is_valid(token, now)]

    def _with_last_use(self, token: StoredToken) -> StoredToken:
        used = self._last_used.get(token.id)
        return token if used is None else replace(token, last_used_at=used)

    # Ending

    async def revoke(self, tokens: Collection[int], by: Identity) -> Sequence[StoredToken]:
        """Have tokens hold no longer, with all that were made by them, and end what is open by them, at once.

        ``NotFoundError`` where one is not there, or somebody else's; then none is revoked. ``StoreUnavailable`` when
        that is not stored: they hold no longer until the daemon ends, and it must be said again.
        """
        for number in tokens:
            found = self._stored.get(number)
            if found is None or not (by.has_role(Role.ADMIN) or by.owns(found.user)):
                raise NotFoundError(
                    f"there is no token {number}",
                    field="token",
                    value=number,
                    hint="koala token list",
                    code=ProblemCode.TOKEN_NOT_FOUND,
                )
        return await self._revoke(self._with_those_made_by(tokens))

    async def revoke_all(self) -> Sequence[StoredToken]:
        """All that were ever asked for; the daemon's own and the configuration's stay."""
        now = self._clock()
        return await self._revoke({number for number, token in self._stored.items() if self.is_valid(token, now)})

    async def _revoke(self, tokens: Collection[int]) -> Sequence[StoredToken]:
        now = self._clock()
        for number in sorted(tokens):
            token = self._stored[number]
            if token.revoked_at is None:
                self._stored[number] = replace(token, revoked_at=now)
            self._valid.pop(token.digest, None)
            for end in tuple(self._open.get(number, ())):
                end()
        revoked = [self._stored[number] for number in sorted(tokens)]
        await self._save(tokens)
        return revoked

    def _with_those_made_by(self, tokens: Iterable[int]) -> set[int]:
        """A token may have been shown to make others, by whoever had it."""
        found, more = set[int](), set(tokens)
        while more:
            found |= more
            more = {number for number, token in self._stored.items() if token.made_by in more} - found
        return found

    # What comes by the calendar

    async def store_last_uses(self) -> None:
        """Once in a while for all, and never at a request."""
        used, self._last_used = self._last_used, {}
        for number, at in used.items():
            if (token := self._stored.get(number)) is not None:
                self._stored[number] = replace(token, last_used_at=at)
        try:
            await self._save(used)
        except (StoreUnavailable, LeaseLost) as error:
            log.warning("when tokens were used is not stored", action="token-not-stored", error=error.message)

    async def tidy(self) -> int:
        """Forget those that ended a while ago; how many. The newest stays, so that no number is given twice."""
        before, newest = self._clock() - RETENTION, max(self._stored, default=0)
        old = {
            number
            for number, token in self._stored.items()
            if number != newest and min(_moments(token), default=before) < before
        }
        # By one of which there is more, what it has made is found when the one that made it is revoked.
        kept = self._stored.keys() - old
        while kept:
            kept = {made_by for number in kept if (made_by := self._stored[number].made_by) in old}
            old -= kept
        async with self._changing:
            if old and self._store is not None:
                await run_in_database(self._store.remove_tokens, old)
                for number in old:
                    self._valid.pop(self._stored.pop(number).digest, None)
        return len(old)

    async def _save(self, tokens: Collection[int]) -> None:
        async with self._changing:
            rows = [self._stored[number] for number in sorted(tokens) if number in self._stored]
            if rows and self._store is not None:
                await run_in_database(self._store.save_tokens, rows)


def _moments(token: StoredToken) -> list[float]:
    """When a token ended, or will."""
    return [at for at in (token.expires_at, token.revoked_at) if at is not None]


def _has_expired(identity: Identity, now: float) -> bool:
    return identity.expires_at is not None and identity.expires_at <= now


def _check_own(order: TokenOrder, by: Identity) -> None:
    if order.user != by.user:
        raise ForbiddenError(
            "tokens for others are made by administrators", field="user", value=order.user, hint="leave it out"
        )
    if not by.has_role(order.role):
        raise ForbiddenError(
            f"a token for {order.role}s is made by administrators",
            field="role",
            value=str(order.role),
            hint="leave it out",
        )
