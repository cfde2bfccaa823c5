"""The token of a client: given by the user, read from the files of this account's own daemon, or a login.

A login needs no input from the user: it was saved by an earlier command, or is requested from the agent of this head
node. Each token is sent only to the daemon that it is for.
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from koalapy.client.errors import Exit, GridError, of_koala
from koalapy.client.http import PORTS
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.model.errors import UsageError
from koalapy.system.local_token import TokenSearch, find_token, format_address, is_start_registered
from koalapy.system.tls import CA_FILE, SYSTEM_TRUST, Trust, check_encrypted, is_this_machine

if TYPE_CHECKING:
    from koalapy.client.logins import Login

DEFAULT_URL = "http://127.0.0.1:8642"
LOCALHOST = ("127.0.0.1", "::1")
START_POLL_INTERVAL_S = 0.1
MAX_LABEL_LENGTH = 64
_WHERE = "it is in tokens of the daemon's configuration, or in the file token of its data directory"


class Access:
    """The address, token and trusted certificates of one daemon.

    Raises ``ValueError`` for an invalid URL, and ``GridError`` if a login is rejected.
    """

    def __init__(
        self,
        url: str | None,
        user_token: str | None,
        ca: str = "",
        timeouts: ClientTimeouts = DEFAULT_TIMEOUTS,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``user_token``: the token given by the user, if any; ``ca``: trusted certificates of the daemon, in PEM.

        Wait for a daemon of this account that starts at the address. ``report`` prints a line about this wait.
        """
        self._report = report
        self.parts, self._timeouts, self.ca, self.token = _parse_url(url or DEFAULT_URL), timeouts, ca, ""
        if user_token:
            self.token = check_showable(
                user_token, "KOALA_TOKEN" if os.environ.get("KOALA_TOKEN") == user_token else "--token"
            )
        self.pinned: Path | None = None
        """The certificate file of this account's own daemon, if the daemon must show exactly that certificate."""
        self.is_login = False
        self.hint = f"correct KOALA_TOKEN or --token: {_WHERE}"
        """Hint for the user if the daemon rejects the token."""
        self._await_start(timeouts.start_notice_s if user_token and url is None else 0.0)
        if not user_token:
            self._find_token(is_url_given=url is not None)
        elif (own_daemon := _own_daemon(self.parts))[1].certificate:
            self.parts, self.pinned = own_daemon[0], own_daemon[1].certificate
        if self.token:
            self._check_encrypted()
        self.trust = self._create_trust()
        # A proxy of the environment does not know this machine's addresses, and must not see a token of this account.
        local = self.pinned is not None or is_this_machine(self.parts.hostname or "")
        is_own_token = bool(self.token) and not user_token
        self.by_proxy = not local and self.parts.scheme == "https" and (not is_own_token or self.is_login)

    @property
    def url(self) -> str:
        """Return the URL without user name and password, which are for the daemon or a proxy in front of it."""
        return self.parts._replace(netloc=self.parts.netloc.rpartition("@")[2]).geturl()

    @property
    def is_starting(self) -> bool:
        """Return whether a daemon of this account at this address is not ready yet."""
        is_local = self.parts.hostname in (*LOCALHOST, "localhost")
        return is_local and is_start_registered(self.parts.port or PORTS[self.parts.scheme])

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def renew_login(self) -> bool:
        """Replace a login that the daemon rejects; return whether a new one was obtained."""
        if not self.is_login:
            return False
        from koalapy.client import logins

        logins.forget_login(self.url, self.token)
        try:
            login = logins.find_login(self.url, self._timeouts)
        except GridError as error:
            self.hint = str(error)
            return False
        if login is None or login.token == self.token:
            return False
        self.token = login.token
        return True

    def _find_token(self, *, is_url_given: bool) -> None:
        """Find a token in the files of this account's daemon, or a login, if the user gave no token.

        If neither exists, only set ``hint``: advice for a rejected request. Raise ``GridError`` if a login is rejected.
        """
        self.parts, search = _own_daemon(self.parts)
        login, silent, failure = None, "", None
        if not search.token:
            try:
                login, silent = self._find_login(is_url_given=is_url_given)
            except GridError as error:
                failure = error
            if login is None and not is_url_given:
                self._await_start(self._timeouts.start_notice_s)
                self.parts, search = _own_daemon(self.parts)
            if failure is not None and not search.token:
                raise failure
        if search.token:
            self.token, self.pinned = search.token, search.certificate
            self.hint = f"the daemon of this account there has another token; set KOALA_TOKEN: {_WHERE}"
            return
        self.hint = f"{silent}{search.reason}; set KOALA_TOKEN: {_WHERE}"
        if login is not None:
            self.parts, self.token, self.ca, self.is_login = _parse_url(login.url), login.token, login.ca, True
            self.hint = "run koala login"

    def _find_login(self, *, is_url_given: bool) -> "tuple[Login | None, str]":
        """Return a login, if any, and the error of silent agents. Raise ``GridError`` if it is rejected."""
        # Imported here, since most commands do not need an agent's login.
        from koalapy.client import logins

        try:
            return logins.find_login(self.url if is_url_given else None, self._timeouts), ""
        except logins.SilentAgentsError as error:
            if not is_url_given:
                raise
            # A killed agent leaves its socket behind, and may have belonged to another daemon.
            return None, f"{error}; "

    def _await_start(self, notice_s: float = 0.0) -> bool:
        """Wait while a daemon of this account starts at an address of this machine; return whether one did.

        End the wait if a program listens there, as when a second daemon starts in vain. ``notice_s``: limit for a
        daemon to register its start.
        """
        began, has_started = time.monotonic(), False
        while (passed := time.monotonic() - began) < self._timeouts.daemon_start_s:
            is_starting = self.is_starting
            if (not is_starting and (has_started or passed >= notice_s)) or self._is_listening():
                break
            if is_starting and not has_started:
                self._report("koala: waiting for the daemon, which is starting")
            has_started |= is_starting
            self._timeouts.sleep(START_POLL_INTERVAL_S)
        return has_started

    def _is_listening(self) -> bool:
        address = self.parts.hostname or "", self.parts.port or PORTS[self.parts.scheme]
        try:
            socket.create_connection(address, self._timeouts.start_notice_s).close()
        except OSError:
            return False
        return True

    def _check_encrypted(self) -> None:
        """Raise ``GridError`` if the token would go over a network in clear."""
        try:
            check_encrypted(self.parts)
        except UsageError as error:
            # An address of this account's own daemon is on this machine.
            if not find_token(self.parts.hostname or "", self.parts.port or PORTS[self.parts.scheme]).token:
                raise of_koala(error) from error

    def _create_trust(self) -> Trust:
        """Return how certificates are verified: pinned for this account's own daemon, by authorities for any other."""
        if self.pinned is not None:
            return Trust(pinned=self.pinned)
        ca_file = os.environ.get(CA_FILE)
        if self.parts.scheme != "https" or not (ca_file or self.ca):
            return SYSTEM_TRUST
        trust = Trust(Path(ca_file)) if ca_file else Trust(authorities=self.ca)
        try:
            trust.check_files()
        except UsageError as error:
            raise of_koala(error) from error
        return trust


def check_showable(token: str, source: str) -> str:
    """Return a token without its trailing newline. Raise ``GridError``, without the token, if it is invalid.

    ``source``: the option or variable with the token, for the error message.
    """
    stripped = token.strip()
    if not stripped:
        raise GridError(f"{source} is blank", Exit.USAGE, "give a token, or leave the option out")
    if not all("!" <= sign <= "~" for sign in stripped):
        hint = "give it as it was printed: tokens have ASCII letters, digits and signs"
        raise GridError(f"{source} is not a token", Exit.USAGE, hint)
    return stripped


def _parse_url(url: str) -> SplitResult:
    """Split the URL of a daemon into its parts. Raise ``ValueError`` with the reason if it is invalid."""
    parts = urlsplit(url.rstrip("/"))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it must begin with http:// or https:// and a host")
    if not parts.path.isascii():
        raise ValueError("its path has characters that are not ASCII: encode them, as %C3%BC")
    try:
        # The codec is slow to import, and most hosts are ASCII.
        labels = parts.hostname.removesuffix(".").split(".") if parts.hostname.isascii() else []
        if not all(0 < len(label) < MAX_LABEL_LENGTH for label in labels if ":" not in label):
            raise UnicodeError
        if not labels:
            parts.hostname.encode("idna")
    except UnicodeError as error:
        raise ValueError("its host is not a name, of which each part has 1 to 63 characters") from error
    return parts


def _own_daemon(parts: SplitResult) -> tuple[SplitResult, TokenSearch]:
    """Return the address of this account's daemon at a URL, and its token.

    Host names are not trusted: the token is used for IP addresses and ``localhost`` only. For a daemon that speaks TLS
    the scheme becomes ``https``.
    """
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    for address in LOCALHOST if host == "localhost" else ():
        if (search := find_token(address, port)).token:
            return _by_tls(parts._replace(netloc=format_address(address, port)), search), search
    search = find_token(host, port)
    return _by_tls(parts, search), search


def _by_tls(parts: SplitResult, search: TokenSearch) -> SplitResult:
    return parts._replace(scheme="https") if search.certificate else parts
