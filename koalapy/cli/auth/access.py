"""What a command shows to its daemon: a token that it was given, that of this account's own daemon, or a login.

A login is made silently: kept from an earlier command, or asked of the agent of this head node. Each token is shown
only to the daemon that it is for.
"""

import os
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import click
from click.core import ParameterSource

from koalapy.cli.errors import CliError, Exit, of_koala
from koalapy.cli.http import PORTS
from koalapy.model.errors import UsageError
from koalapy.system.local_token import Found, address_of, find_token
from koalapy.system.tls import CA_FILE, OF_THIS_MACHINE, Trust, check_encrypted, is_this_machine

LOCALHOST = ("127.0.0.1", "::1")
_WHERE = "it is in tokens of the daemon's configuration, or in the file token of its data directory"


class Access:
    """To one daemon; ``ValueError`` for a URL that is none, ``CliError`` when a login was refused."""

    def __init__(self, url: str, shown: str | None, ca: str = "") -> None:
        """``shown``: the token that was given, if any; ``ca``: certificates by which the daemon is known."""
        self.parts = _parsed(url)
        self.token, self.ca = showable(shown, given_by("token", "--token", "KOALA_TOKEN")) if shown else "", ca
        self.pinned: Path | None = None
        """Where the certificate of this account's own daemon stands, which it must show itself."""
        self._renews = False
        self.hint = f"correct KOALA_TOKEN or --token: {_WHERE}"
        """What to do when the daemon does not let us in."""
        if not shown:
            self._find()
        elif (known := _own_daemon(self.parts))[1].certificate:
            self.parts, self.pinned = known[0], known[1].certificate
        if self.token:
            self._check_encrypted()
        self.trust = self._trust()
        # A proxy of the environment does not know this machine's own addresses, nor may it see a token of our own.
        local = self.pinned is not None or is_this_machine(self.parts.hostname or "")
        own = bool(self.token) and not shown
        self.by_proxy = not local and self.parts.scheme == "https" and (not own or self._renews)

    @property
    def url(self) -> str:
        """As it may be shown: a name and a password in it are for the daemon, or what stands before it."""
        return self.parts._replace(netloc=self.parts.netloc.rpartition("@")[2]).geturl()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def renew(self) -> bool:
        """Get another login in place of one that the daemon does not take any more; False when there is none."""
        if not self._renews:
            return False
        from koalapy.cli.auth import logins

        logins.forget(self.url, self.token)
        try:
            login = logins.find(self.url)
        except CliError as error:
            self.hint = str(error)
            return False
        if login is None or login.token == self.token:
            return False
        self.token = login.token
        return True

    def _find(self) -> None:
        self.parts, found = _own_daemon(self.parts)
        if found.token:
            self.token, self.pinned = found.token, found.certificate
            self.hint = f"this account's own daemon there has another; set KOALA_TOKEN: {_WHERE}"
            return
        # Not every command has a head node's agent beside it, and pays for what asks it.
        from koalapy.cli.auth import logins

        given, silent = given_url(self.url), ""
        try:
            login = logins.find(given)
        except logins.SilentAgentsError as error:
            if given is None:
                raise
            # One that was killed leaves its socket behind, and may have led elsewhere.
            login, silent = None, f"{error}; "
        self.hint = f"{silent}{found.why}; set KOALA_TOKEN: {_WHERE}"
        if login is not None:
            self.parts, self.token, self.ca, self._renews = _parsed(login.url), login.token, login.ca, True
            self.hint = "koala login asks for another login"

    def _check_encrypted(self) -> None:
        """``CliError`` where the token would go over a network in clear."""
        try:
            check_encrypted(self.parts)
        except UsageError as error:
            # What this account's own daemon listens at is this machine, whatever its address.
            if not find_token(self.parts.hostname or "", self.parts.port or PORTS[self.parts.scheme]).token:
                raise of_koala(error) from error

    def _trust(self) -> Trust:
        """This account's own daemon is known by its very certificate, any other by an authority."""
        if self.pinned is not None:
            return Trust(pinned=self.pinned)
        given = os.environ.get(CA_FILE)
        if self.parts.scheme != "https" or not (given or self.ca):
            return OF_THIS_MACHINE
        trust = Trust(Path(given)) if given else Trust(authorities=self.ca)
        try:
            trust.check()
        except UsageError as error:
            raise of_koala(error) from error
        return trust


def showable(token: str, where: str) -> str:
    """A token as a header takes it, without the end of the line of a file; ``CliError`` where it comes from otherwise.

    What it is must not be told, whatever is wrong with it.
    """
    word = token.strip()
    if not word:
        raise CliError(f"{where} is blank", Exit.USAGE, "give a token, or leave it out")
    if not all("!" <= sign <= "~" for sign in word):
        hint = "a token has letters, digits and signs of ASCII only: give it as it was printed"
        raise CliError(f"{where} is no token", Exit.USAGE, hint)
    return word


def given_by(name: str, option: str, variable: str) -> str:
    """Where the value of a command's option comes from."""
    context = click.get_current_context(silent=True)
    is_variable = context is not None and context.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    return variable if is_variable else option


def given_url(url: str) -> str | None:
    """Which daemon the user said is meant; None when that is a command's own default."""
    context = click.get_current_context(silent=True)
    is_default = context is not None and context.get_parameter_source("url") is ParameterSource.DEFAULT
    return None if is_default else url.rstrip("/")


def _parsed(url: str) -> SplitResult:
    parts = urlsplit(url.rstrip("/"))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it must begin with http:// or https:// and a host")
    if not parts.path.isascii():
        raise ValueError("its path has signs that are not ASCII")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as error:
        raise ValueError("its host is no name, of which each part has 1 to 63 characters") from error
    return parts


def _own_daemon(parts: SplitResult) -> tuple[SplitResult, Found]:
    """Where this account's daemon serves that a URL leads to, and its token.

    A name may lead anywhere, so that a token is shown to addresses only. Of ``localhost`` it is known which these are.
    One that speaks TLS is asked by it, whatever the URL says.
    """
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    for address in LOCALHOST if host == "localhost" else ():
        if (found := find_token(address, port)).token:
            return _by_tls(parts._replace(netloc=address_of(address, port)), found), found
    found = find_token(host, port)
    return _by_tls(parts, found), found


def _by_tls(parts: SplitResult, found: Found) -> SplitResult:
    return parts._replace(scheme="https") if found.certificate else parts
