"""Set up a daemon's tokens, identities and logins."""

import os
import pwd
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from koalapy.config.settings import Settings
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login import LoginRules
from koalapy.daemon.listener.certificate import Certificate
from koalapy.daemon.network.network import OWNER
from koalapy.model.errors import reject
from koalapy.model.identity import Identity, Role
from koalapy.store.service_tables import TokenStore
from koalapy.system.local_token import TOKEN_FILE, Registration, load_or_make_token

if TYPE_CHECKING:
    from koalapy.daemon.auth.oidc import Oidc

log = structlog.get_logger()


@contextmanager
def own_access(data_dir: Path, listener: socket.socket, certificate: Certificate | None) -> Iterator[str]:
    """Yield the daemon's token, which has the role of administrator.

    Within the context, commands of the daemon's account find the token and the daemon's address.
    """
    token, reason = load_or_make_token(data_dir)
    if reason:
        log.warning("a new token was made", action="token-made", file=str(data_dir / TOKEN_FILE), reason=reason)
    with ExitStack() as stack:
        try:
            certificate_path = certificate.public_path if certificate else None
            stack.callback(Registration(token, reachable_addresses(listener), certificate_path).close)
        except OSError as error:
            # Accounts of system services may have no home directory. The token is in the data directory as well.
            log.warning(
                "cannot register the daemon's token: set KOALA_TOKEN for commands of this account",
                action="token-not-registered",
                file=str(data_dir / TOKEN_FILE),
                reason=str(error),
            )
        yield token


def reachable_addresses(listener: socket.socket) -> list[tuple[str, int]]:
    """Return the local addresses of a listening socket: its address, and for a wildcard those of the loopback."""
    host, port = listener.getsockname()[:2]
    loopback = {"0.0.0.0": ["127.0.0.1"], "::": ["127.0.0.1", "::1"]}
    if host == "::" and listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        loopback["::"] = ["::1"]  # Another process may listen on 127.0.0.1.
    return [(address, port) for address in (host, *loopback.get(host, ()))]


def load_provider(settings: Settings) -> "Oidc | None":
    """Return the verifier of the OpenID provider's tokens, or None if no provider is configured."""
    if settings.oidc is None:
        return None
    from koalapy.daemon.auth.oidc import Oidc  # takes 0.2 s, so it is imported only if needed

    return Oidc(settings.oidc)


def reserved_names() -> frozenset[str]:
    """Return the users that the daemon itself acts as: its account, and the owner of internal jobs."""
    return frozenset((_own_account(), OWNER))


def check_reserved_names(settings: Settings) -> None:
    """Raise ``UsageError`` if the configuration uses a reserved name for a user."""
    users = {f"tokens[{index}].user": section.user for index, section in enumerate(settings.tokens)}
    users |= {f"users.{name}": name for name in settings.users}
    if settings.oidc is not None:
        users |= {f"oidc.users.{claim}": user for claim, user in settings.oidc.users.items()}
    for field, user in users.items():
        if user in reserved_names():
            problem = f"is {user}, which is reserved: the daemon runs as {user}, who is an administrator"
            reject(field, user, problem, "give the user another name; the daemon's account uses the daemon's own token")


def build_identities(
    settings: Settings, store: TokenStore, clock: Callable[[], float], provider: "Oidc | None", own_token: str
) -> Identities:
    """Return the identities of all valid tokens: the daemon's own, configured, stored and provider tokens."""
    users = settings.known_users()
    fixed = {own_token: Identity(_own_account(), Role.ADMIN, "the daemon's own token")}
    for index, section in enumerate(settings.tokens):
        groups = users.groups_of(section.user)
        source = f"tokens[{index}] of the configuration"
        fixed[section.token] = Identity(section.user, section.role, source, groups, guessable=True)
    return Identities(fixed, store, users, clock, provider, reserved_names())


def login_rules(settings: Settings) -> LoginRules:
    """Return the configured rules for logins of accounts that agents attest."""
    return LoginRules(
        settings.known_users(),
        settings.known_domains(),
        settings.login_lifetime,
        frozenset(settings.trusted_logins),
        {name: section.min_uid for name, section in settings.clusters.items()},
        {name: section.refused_accounts for name, section in settings.clusters.items()},
        reserved_names(),
    )


def _own_account() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid-{os.geteuid()}"
