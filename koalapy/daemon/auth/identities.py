"""Authenticate callers by token: the daemon's own token, configured, stored and OpenID provider tokens."""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING

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
from koalapy.store.records import StoredToken
from koalapy.store.service_tables import TokenStore

if TYPE_CHECKING:
    from koalapy.daemon.auth.oidc import Oidc

log = structlog.get_logger()

PREFIX = "koala_"
"""Start of every token, by which secret scanners find leaked tokens, such as in a repository."""
DEFAULT_SPAN = 30 * 86400.0
"""Default lifetime of a token in seconds."""
RETENTION = 7 * 86400.0
"""Seconds for which an expired or revoked token stays listed."""
MAX_TOKENS_OF_ONE = 1000
"""Maximum number of valid tokens of a user."""
LAST_USE_INTERVAL = 60.0
"""Seconds between two writes of the times at which tokens were last used."""

ROLES = frozenset(str(role) for role in Role)

End = Callable[[], None]


def agent_of(cluster: ClusterName) -> str:
    """Return the ``created_by`` of tokens issued for logins from a cluster."""
    return f"the agent of {cluster}"


def attested_login(token: StoredToken) -> tuple[str, ClusterName]:
    """Return the account of a login and the cluster of the agent that attested it; both empty for other tokens."""
    account, _, cluster = token.how.rpartition(" on ")
    return (account, cluster) if account and token.created_by == agent_of(cluster) else ("", "")


def digest_of_token(token: str) -> str:
    """Return the SHA-256 digest under which a token is stored, so that the store holds no usable token."""
    return sha256(token.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """A request for a new token."""

    user: str
    role: Role
    expires: float | None = DEFAULT_SPAN
    """Lifetime in seconds; None for a token that does not expire."""
    note: str = ""


class Identities:
    """The valid tokens and their identities.

    Tokens are kept and compared by digest only, so that neither the memory nor the time of a comparison reveals one.
    """

    def __init__(
        self,
        fixed: Mapping[str, Identity],
        store: TokenStore | None = None,
        users: Users | None = None,
        clock: Callable[[], float] = time.time,
        provider: "Oidc | None" = None,
        reserved: Collection[str] = (),
        max_tokens: int = MAX_TOKENS_OF_ONE,
    ) -> None:
        """``fixed``: tokens that are valid while the daemon runs; ``reserved``: users that the daemon itself acts as,
        which no other source of tokens may name; ``max_tokens``: maximum number of valid tokens of a user."""
        self._max_tokens = max_tokens
        self._provider, self._reserved = provider, frozenset(reserved)
        self._fixed = {digest_of_token(token): identity for token, identity in fixed.items()}
        self._store, self._users, self._clock = store, users or Users({}), clock
        self._stored: dict[int, StoredToken] = {}
        self._valid: dict[str, Identity] = {}
        self.load_tokens(store.tokens() if store else ())
        self._last_used: dict[int, float] = {}
        """Times of last use that are not stored yet, by token number."""
        self._open: dict[int, set[End]] = {}
        """Callbacks that cancel the running requests of each token, by token number."""
        self._changing = asyncio.Lock()
        """Held while tokens are written, so that an earlier row never overwrites a later one."""

    def load_tokens(self, tokens: Iterable[StoredToken]) -> None:
        """Accept exactly these stored tokens."""
        self._stored, self._valid = {token.id: token for token in tokens}, {}
        for token in self._stored.values():
            self._register_token(token)

    def role_of(self, user: str) -> Role:
        """Return the highest role that a user has by any source.

        The sources are the settings ``users`` and ``tokens``, valid stored tokens, the OpenID provider, and the
        reserved names. An account that is not mapped to a user (``ACCOUNT@CLUSTER``) also has the role of the user
        ``ACCOUNT``, since both may be the same person.
        """
        names, now = {user, user.rpartition("@")[0] or user}, self._clock()
        if names & self._reserved:
            return Role.ADMIN
        identities = [identity for identity in self._fixed.values() if identity.user in names]
        identities += [
            identity for identity in self._valid.values() if identity.user in names and not _has_expired(identity, now)
        ]
        roles = [identity.role for identity in identities] + [self._users.configured_role(name) for name in names]
        if self._provider is not None:
            roles += [self._provider.role_of(name) for name in names]
        return highest_role(roles)

    def _register_token(self, token: StoredToken) -> None:
        """Accept a stored token for authentication, unless it was revoked or its role is unknown."""
        if token.revoked_at is None and token.role in ROLES:
            how = token.how or f"token {token.id}"
            groups = self._users.groups_of(token.user)
            _, site = attested_login(token)
            self._valid[token.digest] = Identity(
                token.user, Role(token.role), how, groups, token.id, token.expires_at, site
            )

    def find_identity(self, token: str) -> Identity | None:
        """Return the identity of a token, or None if it is unknown, expired or revoked.

        A provider token is known only after ``verify``.
        """
        digest = digest_of_token(token)
        if (fixed := self._fixed.get(digest)) is not None:
            return fixed
        identity = self._valid.get(digest)
        if identity is None or identity.token is None:
            signed = self._provider.cached_result(token) if self._provider and is_provider_token(token) else None
            return self._of_provider(signed) if signed and signed.user not in self._reserved else None
        now = self._clock()
        if _has_expired(identity, now):
            return None
        self._last_used[identity.token] = now
        return identity

    async def verify_token(self, token: str) -> Identity | None:
        """Verify a token with the OpenID provider's keys and return its identity; None for other tokens.

        Raise ``TokenRejected`` for an invalid token, and ``SiteUnavailable`` while the provider's keys are unavailable.
        """
        if self._provider is None or not is_provider_token(token):
            return None
        signed = await self._provider.verify_token(token)
        if signed.user in self._reserved:
            raise TokenRejected(
                f"the user {signed.user} is the daemon's own; map the claim to another one in oidc.users"
            )
        return self._of_provider(signed)

    def _of_provider(self, signed: Verified) -> Identity:
        """Return the identity of a verified provider token, with the higher of configured and attested role."""
        user = signed.user
        role = highest_role([self._users.configured_role(user), signed.role or Role.USER])
        return Identity(
            user, role, "a token of the OpenID provider", self._users.groups_of(user), None, signed.expires_at
        )

    @contextmanager
    def end_on_expiry(self, identity: Identity, end: End) -> Iterator[None]:
        """Call ``end`` when the identity's token expires or is revoked before the context exits."""
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

    # Create tokens

    async def create_token(self, order: TokenOrder, caller: Identity) -> tuple[StoredToken, str]:
        """Create a token; return its stored record and its text, which cannot be retrieved later.

        Raise ``ForbiddenError`` if a caller other than an administrator orders a token for another user or with a
        higher role. Such a caller's new token expires no later than the token used for the request.
        """
        now = self._clock()
        if order.user in self._reserved and caller.user not in self._reserved:
            raise ForbiddenError(
                f"the name {order.user} is reserved for the daemon",
                field="user",
                value=order.user,
                hint="give another name",
            )
        expires_at = None if order.expires is None else now + order.expires
        if not caller.has_role(Role.ADMIN):
            _check_permission(order, caller)
            if caller.expires_at is not None:
                expires_at = caller.expires_at if expires_at is None else min(expires_at, caller.expires_at)
        return await self.issue_token(
            order.user, order.role, expires_at, caller.user, note=order.note, made_by=caller.token
        )

    async def issue_token(
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
        """Store a new token without checking permission; return its stored record and its text.

        Raise ``StoreUnavailable`` if the daemon stores no tokens, ``ConflictError`` if the user has too many, and
        ``ForbiddenError`` if the token ``made_by`` is no longer valid.
        """
        if self._store is None:
            raise StoreUnavailable("this daemon keeps no tokens")
        async with self._changing:
            now = self._clock()
            token_count = sum(self.is_valid(token, now) for token in self._stored.values() if token.user == user)
            if token_count >= self._max_tokens:
                raise ConflictError(
                    f"{user} has {self._max_tokens} tokens already",
                    field="user",
                    value=user,
                    hint="revoke some",
                    code=ProblemCode.LIMIT_EXCEEDED,
                )
            maker = None if made_by is None else self._stored.get(made_by)
            if made_by is not None and (maker is None or not self.is_valid(maker, now)):
                raise ForbiddenError("your token has expired or was revoked", hint="log in again")
            token_text = PREFIX + secrets.token_urlsafe(32)
            number = max(self._stored, default=0) + 1
            token = StoredToken(
                number,
                digest_of_token(token_text),
                user,
                str(role),
                how,
                note,
                now,
                created_by,
                expires_at,
                made_by=made_by,
            )
            # Register the token before writing it: if its maker is revoked during the write, this token is revoked too.
            self._stored[number] = token
            try:
                await run_in_database(self._store.save_tokens, [token])
            except BaseException:
                del self._stored[number]
                raise
            if self._stored[number].revoked_at is not None:
                raise ForbiddenError("your token has expired or was revoked", hint="log in again")
            self._register_token(token)
        return token, token_text

    # List tokens

    @staticmethod
    def is_valid(token: StoredToken, now: float) -> bool:
        return token.revoked_at is None and (token.expires_at is None or token.expires_at > now)

    def list_tokens(self, caller: Identity, user: str | None = None, *, every: bool = False) -> Sequence[StoredToken]:
        """Return the valid tokens, with ``every`` the expired and revoked ones as well.

        Administrators get the tokens of ``user``, or of all users if it is None; other callers get only their tokens.
        """
        now = self._clock()
        if not caller.has_role(Role.ADMIN):
            user = caller.user if user in (None, caller.user) else ""
        chosen = (token for token in self._stored.values() if user in (None, token.user))
        return [
            replace(token, last_used_at=self._last_used.get(token.id, token.last_used_at))
            for token in chosen
            if every or self.is_valid(token, now)
        ]

    # Revoke tokens

    async def revoke_tokens(self, tokens: Collection[int], caller: Identity) -> Sequence[StoredToken]:
        """Revoke tokens and all tokens made by them, and cancel their running requests at once.

        Raise ``NotFoundError`` if a token does not exist or belongs to another user; then none is revoked. Raise
        ``StoreUnavailable`` if the change cannot be stored: the tokens are revoked only until the daemon ends, and must
        be revoked again.
        """
        for number in tokens:
            token = self._stored.get(number)
            if token is None or not (caller.has_role(Role.ADMIN) or caller.owns(token.user)):
                raise NotFoundError(
                    f"there is no token {number}",
                    field="token",
                    value=number,
                    hint="koala token list",
                    code=ProblemCode.TOKEN_NOT_FOUND,
                )
        return await self._apply_revocation(self._with_derived_tokens(tokens))

    async def revoke_all(self) -> Sequence[StoredToken]:
        """Revoke all valid stored tokens; the daemon's own token and the configured tokens stay valid."""
        now = self._clock()
        return await self._apply_revocation(
            {number for number, token in self._stored.items() if self.is_valid(token, now)}
        )

    async def _apply_revocation(self, tokens: Collection[int]) -> Sequence[StoredToken]:
        """Revoke tokens in memory, cancel their open requests, and then store it. Return the revoked tokens."""
        now = self._clock()
        for number in sorted(tokens):
            token = self._stored[number]
            if token.revoked_at is None:
                self._stored[number] = replace(token, revoked_at=now)
            self._valid.pop(token.digest, None)
            for end in tuple(self._open.get(number, ())):
                end()
        revoked = [self._stored[number] for number in sorted(tokens)]
        await self._store_tokens(tokens)
        return revoked

    def _with_derived_tokens(self, tokens: Iterable[int]) -> set[int]:
        """Return the tokens and all tokens made by them, directly or indirectly."""
        numbers, derived = set[int](), set(tokens)
        while derived:
            numbers |= derived
            derived = {number for number, token in self._stored.items() if token.made_by in derived} - numbers
        return numbers

    # Periodic work

    async def store_last_uses(self) -> None:
        """Store the times of last use of all tokens; called periodically, so that no request waits for it."""
        used, self._last_used = self._last_used, {}
        for number, used_at in used.items():
            if (token := self._stored.get(number)) is not None:
                self._stored[number] = replace(token, last_used_at=used_at)
        try:
            await self._store_tokens(used)
        except (StoreUnavailable, LeaseLost) as error:
            log.warning("when tokens were used is not stored", action="token-not-stored", error=error.message)

    async def remove_expired(self) -> int:
        """Remove tokens that ended more than ``RETENTION`` ago and return their number.

        The newest token stays, so that no number is used twice.
        """
        horizon, newest = self._clock() - RETENTION, max(self._stored, default=0)
        old = {
            number
            for number, token in self._stored.items()
            if number != newest
            and any(end is not None and end < horizon for end in (token.expires_at, token.revoked_at))
        }
        # Keep an old token that made a token that stays: revocation follows these links.
        retained = self._stored.keys() - old
        while retained:
            retained = {made_by for number in retained if (made_by := self._stored[number].made_by) in old}
            old -= retained
        async with self._changing:
            if old and self._store is not None:
                await run_in_database(self._store.remove_tokens, old)
                for number in old:
                    self._valid.pop(self._stored.pop(number).digest, None)
        return len(old)

    async def _store_tokens(self, tokens: Collection[int]) -> None:
        async with self._changing:
            rows = [self._stored[number] for number in sorted(tokens) if number in self._stored]
            if rows and self._store is not None:
                await run_in_database(self._store.save_tokens, rows)


def _has_expired(identity: Identity, now: float) -> bool:
    return identity.expires_at is not None and identity.expires_at <= now


def _check_permission(order: TokenOrder, caller: Identity) -> None:
    """Raise ``ForbiddenError`` if a caller may not make a token for that user or role."""
    if order.user != caller.user:
        raise ForbiddenError(
            f"only administrators may create tokens for other users, such as {order.user}",
            field="user",
            value=order.user,
            hint="leave it out",
        )
    if not caller.has_role(order.role):
        raise ForbiddenError(
            f"you have the role {caller.role}, so you may not create a token with the role {order.role}",
            field="role",
            value=str(order.role),
            hint="leave it out",
        )
