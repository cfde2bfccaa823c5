"""Who may come in to a daemon: this account by its own token, the configuration's people, and whoever was made one."""

import os
import pwd
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from koalapy.config.settings import Settings
from koalapy.daemon.agents.agent_messages import NoteImpostor
from koalapy.daemon.auth.identities import LAST_USE_INTERVAL, Identities, Verifier
from koalapy.daemon.auth.login import LoginRules, Logins
from koalapy.daemon.auth.provider_login import ProviderLogins
from koalapy.daemon.engine.duties import Duty
from koalapy.daemon.jobs.retention import HOUSEKEEPING_INTERVAL
from koalapy.daemon.listener.certificate import Certificate
from koalapy.daemon.listening import addresses
from koalapy.daemon.network.network import OWNER
from koalapy.daemon.observability.audit import REFUSED, Audit
from koalapy.model.errors import LeaseLost, StoreUnavailable, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job
from koalapy.ports import TokenStore
from koalapy.protocol.messages import Impostor
from koalapy.system.local_token import TOKEN_FILE, Registration, own_token

if TYPE_CHECKING:
    from koalapy.daemon.auth.oidc import Oidc

REFRESH_INTERVAL = 300.0
"""Seconds after which a provider's keys are taken anew, so that one that was withdrawn is not believed for long."""

log = structlog.get_logger()


@contextmanager
def own_access(data_dir: Path, listener: socket.socket, certificate: Certificate | None) -> Iterator[str]:
    """The daemon's own, an administrator's, which this account's commands find while we serve."""
    token, why = own_token(data_dir)
    if why:
        log.warning("a new token was made", action="token-made", file=str(data_dir / TOKEN_FILE), reason=why)
    with ExitStack() as stack:
        try:
            shown = certificate.shown if certificate else None
            stack.callback(Registration(token, addresses(listener), shown).close)
        except OSError as error:
            # An account without a home of its own, as services have: the token is in the data directory all the same.
            log.warning(
                "the commands of this account must be given the token: KOALA_TOKEN",
                action="token-not-registered",
                file=str(data_dir / TOKEN_FILE),
                reason=str(error),
            )
        yield token


def openid_provider(settings: Settings) -> "Oidc | None":
    """Whose tokens are taken beside, if anybody's."""
    if settings.oidc is None:
        return None
    from koalapy.daemon.auth.oidc import Oidc  # a fifth of a second that no other daemon needs to start

    return Oidc(settings.oidc)


def provider_logins(settings: Settings, identities: Identities) -> ProviderLogins | None:
    """Where browsers may log in at the provider, if the configuration says how."""
    provider = settings.oidc
    if provider is None or provider.authorization_endpoint is None:
        return None
    return ProviderLogins(provider, identities)


def reserved_names() -> frozenset[str]:
    """Return the users that the daemon itself acts as: its account, and the owner of its own jobs."""
    return frozenset((_own_account(), OWNER))


def check_reserved_names(settings: Settings) -> None:
    """Raise ``UsageError`` if the configuration gives a name of the daemon's own to another user."""
    sources = {f"tokens[{index}].user": section.user for index, section in enumerate(settings.tokens)}
    sources |= {f"users.{name}": name for name in settings.users}
    if settings.oidc is not None:
        sources |= {f"oidc.users.{claim}": user for claim, user in settings.oidc.users.items()}
    for field, user in sources.items():
        if user in reserved_names():
            raise UsageError(
                f"{field}: the name {user} is the daemon's own, and what is {user}'s is the administrator's",
                field=field,
                value=user,
                hint="give the user another name; the daemon's account uses the daemon's token",
            )


def build_identities(
    settings: Settings, store: TokenStore, clock: Callable[[], float], provider: Verifier | None, own_token: str
) -> Identities:
    """Return the identities of the daemon's own token, of the configuration's, of stored and of the provider's."""
    users = settings.known_users()
    fixed = {own_token: Identity(_own_account(), Role.ADMIN, "the daemon's own token")}
    for index, section in enumerate(settings.tokens):
        groups = users.groups_of(section.user)
        how = f"tokens[{index}] of the configuration"
        fixed[section.token] = Identity(section.user, section.role, how, groups, guessable=True)
    return Identities(fixed, store, users, clock, provider, reserved_names())


def note_impostors(audit: Audit) -> NoteImpostor:
    """Who claimed to be a job's runner, as its cluster's agent told it, is written down."""

    async def note(cluster: str, job: Job, told: Impostor) -> None:
        how = "without the node's secret" if told.how == "forged" else "with the node's secret, though it has a runner"
        detail = f"node {told.node} of {told.token}, {how}, {told.times} times since it was told last"
        origin, target = f"{told.address} on {cluster}"[:100], f"job {job.id}"
        await audit.record("impersonate-runner", None, origin=origin, target=target, outcome=REFUSED, detail=detail)

    return note


def build_logins(settings: Settings, identities: Identities, clock: Callable[[], float], audit: Audit) -> Logins:
    """Return the logins for which the clusters' agents vouch."""
    rules = LoginRules(
        settings.known_users(),
        settings.known_domains(),
        settings.login_lifetime,
        frozenset(settings.trusted_logins),
        {name: section.min_uid for name, section in settings.clusters.items()},
        {name: section.refused_accounts for name, section in settings.clusters.items()},
        reserved_names(),
    )
    return Logins(rules, identities, clock, audit=audit)


def _own_account() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid-{os.geteuid()}"


def token_duties(identities: Identities, provider: "Oidc | None") -> list[Duty]:
    async def tidy() -> None:
        try:
            await identities.tidy()
        except (StoreUnavailable, LeaseLost) as error:
            log.warning("not all tokens that ended were forgotten", action="token-not-stored", error=error.message)

    keys = [] if provider is None else [Duty("keys of the provider", REFRESH_INTERVAL, provider.keys.refresh)]
    return [
        *keys,
        Duty("last uses of tokens", LAST_USE_INTERVAL, identities.store_last_uses),
        Duty("tokens", HOUSEKEEPING_INTERVAL, tidy),
    ]
