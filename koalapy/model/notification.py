"""What users and operators want to be told of, where, and what is on its way to them."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

Channel = Literal["mail", "webhook"]
MAX_URL_LENGTH = 2000
ADDRESS = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){0,8}")
"""A plain mail address: nothing that a header or another's mailer could read as more than one."""
PORTS = {"http": 80, "https": 443}


class MailType(StrEnum):
    """Of what a job's owner wants to be told."""

    BEGIN = "begin"
    """It runs; again after each restart."""
    END = "end"
    """It is over, however it ended."""
    FAIL = "fail"
    """It is over, and has failed."""
    WAITING = "waiting"
    """It has waited for long."""


@dataclass(frozen=True, slots=True)
class Notification:
    """Something to be told to one place; times in seconds since the epoch."""

    id: int
    at: float
    channel: Channel
    to: str
    """A mail address, or a URL."""
    owner: str
    """For whom; empty of what operators are told."""
    body: dict[str, Any]
    """As webhooks tell it."""
    tries: int = 0
    next_at: float = 0.0
    """Not to be tried before."""

    @property
    def destination(self) -> str:
        """Where it goes, for logs: of a URL, whose path may be a secret, the host only."""
        return self.to if self.channel == "mail" else host_of(urlsplit(self.to))


@dataclass(frozen=True, slots=True)
class AllowedRecipients:
    """Where users may have something told: nobody else is written to, and no other host asked."""

    recipients: tuple[str, ...] = ()
    """Mail addresses, or domains with all theirs (``@example.org``)."""
    hosts: frozenset[str] = field(default_factory=frozenset)
    """Of webhooks, with the port where it is not that of https."""

    def mail_problem(self, address: str) -> str:
        """What stands against a mail address; empty when nothing does."""
        if not self.recipients:
            return "this daemon mails no users"
        if not ADDRESS.fullmatch(address):
            return "no mail address as name@example.org"
        allowed = {each.lower() for each in self.recipients}
        name, _, domain = address.lower().rpartition("@")
        return "" if {f"{name}@{domain}", f"@{domain}"} & allowed else "not one that this daemon may write to"

    def webhook_problem(self, url: str) -> str:
        """The same of a webhook."""
        if not self.hosts:
            return "this daemon asks no webhooks of users"
        if wrong := url_problem(url):
            return wrong
        return "" if host_of(urlsplit(url)) in self.hosts else "not on a host that this daemon may ask"


def url_problem(url: str) -> str:
    """Why something is no URL of a webhook; empty when it is."""
    if len(url) > MAX_URL_LENGTH or not all("!" <= sign <= "~" for sign in url) or "\\" in url:
        return "no URL: it has spaces, or signs that are not of ASCII"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "no URL"
    if parts.scheme not in PORTS or not parts.hostname or port == 0:
        return "no URL as https://hooks.example.org/path"
    if parts.username is not None or parts.fragment:
        return "a URL with a user or a fragment, which webhooks do not have"
    is_here = parts.hostname in ("localhost", "127.0.0.1", "::1")
    return "" if parts.scheme == "https" or is_here else "not encrypted: give an https URL"


def host_of(url: SplitResult) -> str:
    """``hooks.example.org``, or with a port that is not the scheme's ``hooks.example.org:8443``; in small letters."""
    host = (url.hostname or "").lower()
    host = f"[{host}]" if ":" in host else host
    return host if url.port in (None, 443) and url.scheme == "https" else f"{host}:{url.port or PORTS[url.scheme]}"
