"""Log in accounts that a cluster's agent attests: map them to users, and issue short-lived tokens.

An agent is trusted only to attest which account of its cluster requests a login. The daemon's configuration maps the
account to a user and a role.
"""

import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import structlog

from koalapy.daemon.auth.identities import Identities, agent_of, attested_login
from koalapy.daemon.observability.audit import DONE, REFUSED, Audit
from koalapy.model.errors import BusyError, KoalaError
from koalapy.model.identity import Identity, Role
from koalapy.model.request import ClusterName
from koalapy.model.throttle import Throttle
from koalapy.model.users import Domain, Users
from koalapy.protocol.messages import Vouch, Vouched
from koalapy.store.records import StoredToken

log = structlog.get_logger()

ROOT, NOBODY = 0, 65534
MAX_LOGINS = 20
"""Maximum number of valid logins of an account; the oldest ones are revoked."""
ACCOUNT = re.compile(r"[A-Za-z0-9_.+-]{1,80}(@[A-Za-z0-9.-]{1,80})?\$?", re.ASCII)
"""Names of accounts that may log in without an entry in the configuration."""
_UNKNOWN_UID = 2**31 - 1
"""A uid above those of all system accounts, for checks where the real one is unknown."""
_DAEMON = Identity("", Role.ADMIN, "the daemon itself")


@dataclass(frozen=True, slots=True)
class LoginRules:
    """The configured rules for logins."""

    users: Users
    domains: Mapping[ClusterName, Domain]
    lifetime: float
    """Lifetime of a login's token in seconds."""
    trusted: frozenset[ClusterName] = frozenset()
    """Clusters from which logins get the user's configured role; logins from other clusters get ``user``."""
    min_uids: Mapping[ClusterName, int] | None = None
    """Lowest uid that is not a system account, by cluster; 1000 for clusters that are missing."""
    refused: Mapping[ClusterName, Collection[str]] = field(default_factory=dict)
    """Accounts that are rejected, by cluster."""
    reserved: Collection[str] = frozenset()
    """Users that the daemon itself acts as; an account mapped to one is rejected."""

    def user_of(self, cluster: ClusterName, account: str, uid: int) -> str:
        """Return the user of an account. Raise ``LoginRejected`` if it may not log in, or its user is reserved."""
        user = self._mapped_user(cluster, account, uid)
        if user in self.reserved:
            raise LoginRejected(
                f"the account {account} of {cluster} belongs to user {user}, a name that is reserved for the daemon",
                "show a token: koala token create, on the daemon's host, makes one (KOALA_TOKEN)",
            )
        return user

    def _mapped_user(self, cluster: ClusterName, account: str, uid: int) -> str:
        """Return the user of an account by the configuration. Raise ``LoginRejected`` with a hint if it has none."""
        domain = self.domains.get(cluster, Domain())
        configured_user = self.users.configured_user_of(cluster, account)
        if account in self.refused.get(cluster, ()):
            raise LoginRejected(
                f"the configuration denies logins to the account {account} of {cluster}",
                "ask the grid's administrators why",
            )
        if domain.identity == "own":
            if not domain.user or configured_user not in (None, domain.user):
                raise LoginRejected(f"{account} of {cluster} is not {domain.user}", f"correct clusters.{cluster}.user")
            return domain.user
        if configured_user is not None:
            return configured_user
        hint = f"ask the grid's administrators for users.NAME.accounts: {{{cluster}: {account}}}"
        min_uid = (self.min_uids or {}).get(cluster, 1000)
        if uid in (ROOT, NOBODY) or uid < min_uid:
            raise LoginRejected(
                f"{account} of {cluster} has uid {uid}, a system account (uid 0, 65534 "
                f"or below {min_uid}), which may log in only if it is mapped to a user",
                hint,
            )
        user = self.users.user_of(cluster, account)
        if user is None:
            raise LoginRejected(f"the account {account} of {cluster} belongs to no configured user", hint)
        if not ACCOUNT.fullmatch(account):
            raise LoginRejected(
                f"the account name {account!r} of {cluster} is not a valid user name: "
                "give it a user under users.NAME.accounts",
                hint,
            )
        return user

    def role_of(self, user: str, cluster: ClusterName) -> Role:
        """Return the role of a login: the configured one if the cluster is trusted, otherwise ``user``."""
        return self.users.configured_role(user) if cluster in self.trusted else Role.USER


class LoginRejected(Exception):
    """The rejection of a login, with a hint for the user."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Logins:
    """Logins of accounts that agents attest, limited in rate by cluster and by account."""

    def __init__(
        self,
        rules: LoginRules,
        tokens: Identities,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        audit: Audit | None = None,
        *,
        may_log: Callable[[ClusterName], bool],
    ) -> None:
        """``may_log``: returns whether a log line about a cluster's agent is within its budget."""
        self._audit, self._may_log = audit, may_log
        self._rules, self._tokens, self._clock, self._monotonic = rules, tokens, clock, monotonic
        self._by_cluster = Throttle(burst=500, interval=0.1)
        self._by_account = Throttle(burst=12, interval=5.0)

    async def handle_vouch(self, cluster: ClusterName, vouch: Vouch) -> Vouched:
        """Log in an account of ``cluster`` that its agent attests; return a token, or why the login is rejected."""
        try:
            return await self._log_in(cluster, vouch)
        except LoginRejected as refusal:
            error, hint = refusal.message, refusal.hint
        except KoalaError as failure:
            error, hint = failure.message, failure.hint or "try again later"
        if self._may_log(cluster):
            account = vouch.account[:100]
            log.warning("login refused", action="login-refused", cluster=cluster, account=account, error=error)
        await self._record_login(cluster, None, vouch.account, REFUSED, error)
        return Vouched(ident=vouch.ident, error=error, hint=hint)

    async def _log_in(self, cluster: ClusterName, vouch: Vouch) -> Vouched:
        """Issue a token for the account that an agent vouches for. Revoke the oldest such tokens beyond the limit.

        Raise ``LoginRejected`` if the account may not log in or logs in too often.
        """
        now, account = self._monotonic(), vouch.account
        if wait := self._by_cluster.count_if_allowed(cluster, now):
            raise LoginRejected(f"too many logins from {cluster}", f"try again in {wait:.0f} s")
        # Rejected accounts are not counted by account, so that they take no memory.
        user = self._rules.user_of(cluster, account, vouch.uid)
        if vouch.runs_jobs and self._rules.users.configured_user_of(cluster, account) is None:
            raise LoginRejected(
                f"{account} of {cluster} is the account of all jobs there, each of which would be another user so",
                "log in as yourself, or show a token (KOALA_TOKEN)",
            )
        role = self._rules.role_of(user, cluster)
        if wait := self._by_account.count_if_allowed((cluster, account), now):
            raise LoginRejected(f"too many logins of {account} on {cluster}", f"try again in {wait:.0f} s")
        how = f"{account} on {cluster}"
        lifetime = self._rules.lifetime
        token, token_text = await self._tokens.issue_token(
            user, role, self._clock() + lifetime, agent_of(cluster), how=how
        )
        log.info("login", action="login", cluster=cluster, account=account, user=user, role=str(role), token=token.id)
        await self._record_login(cluster, Identity(user, role, how), f"token {token.id}", DONE)
        logins = sorted(token.id for token in self._tokens.list_tokens(_DAEMON, user) if token.how == how)
        if excess := logins[:-MAX_LOGINS]:
            await self._tokens.revoke_tokens(excess, _DAEMON)
        return Vouched(ident=vouch.ident, token=token_text, user=user, role=str(role), lifetime=lifetime)

    async def _record_login(
        self, cluster: ClusterName, user: Identity | None, target: str, outcome: str, detail: str = ""
    ) -> None:
        if self._audit is not None:
            origin = f"cluster {cluster}"
            await self._audit.record("login", user, origin=origin, target=target[:100], outcome=outcome, detail=detail)

    async def revoke_outdated(self) -> None:
        """Revoke the logins that the present configuration would not grant; called when the daemon starts."""
        outdated = [token.id for token in self._tokens.list_tokens(_DAEMON) if self._is_outdated(token)]
        if outdated:
            log.info("logins of an earlier configuration are over", action="logins-over", tokens=outdated)
            await self._tokens.revoke_tokens(outdated, _DAEMON)

    def _is_outdated(self, token: StoredToken) -> bool:
        """Check whether a login's token no longer fits the configuration: another user, another role, or no login."""
        account, cluster = attested_login(token)
        if not cluster:
            return False  # Not the token of a login.
        try:
            user = self._rules.user_of(cluster, account, uid=_UNKNOWN_UID)
        except LoginRejected:
            return True
        return user != token.user or str(self._rules.role_of(user, cluster)) != token.role


LOGIN_CODE_TTL_S = 60.0
"""Lifetime of a code in seconds."""
MAX_CODES = 1000
"""Maximum number of valid codes."""


class LoginCodes:
    """One-time codes that log a browser in, kept in memory only: a restart of the daemon invalidates them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: dict[str, tuple[Identity, float]] = {}

    def create_code(self, identity: Identity) -> str:
        """Return a new code that logs in with the given identity. Raise ``BusyError`` if there are too many codes."""
        now = self._clock()
        self._codes = {code: (holder, until) for code, (holder, until) in self._codes.items() if until > now}
        if len(self._codes) >= MAX_CODES:
            raise BusyError(
                "too many browser logins are pending", retry_after=LOGIN_CODE_TTL_S, hint="try again in a minute"
            )
        code = secrets.token_urlsafe(24)
        self._codes[code] = (identity, now + LOGIN_CODE_TTL_S)
        return code

    def find_identity(self, code: str) -> Identity | None:
        """Return the identity of a code without using it up, or None if the code is unknown or expired."""
        identity, until = self._codes.get(code, (None, 0.0))
        return identity if until > self._clock() else None

    def redeem_code(self, code: str) -> Identity | None:
        """Return the identity of a code and invalidate the code; None if it is unknown or expired."""
        identity = self.find_identity(code)
        self._codes.pop(code, None)
        return identity
