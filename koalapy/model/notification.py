"""Notifications by mail and webhook, and the recipients that are allowed."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from koalapy.model.job_spec import MAX_URL_LENGTH

Channel = Literal["mail", "webhook"]
CHANNELS: tuple[Channel, ...] = ("mail", "webhook")
ADDRESS = re.compile(r"[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){0,8}")
"""A plain mail address, which no mail program can read as several addresses."""
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Notification:
    """A notification for one mail address or webhook; times in seconds since the epoch."""

    id: int
    at: float
    channel: Channel
    to: str
    """A mail address, or a URL."""
    owner: str
    """The recipient; empty for operators."""
    body: dict[str, Any]
    """The JSON body of a webhook call."""
    tries: int = 0
    next_at: float = 0.0
    """Earliest time of the next try."""

    @property
    def source(self) -> str:
        """Return the key of its limits: its owner; of an alert its cluster, so that no cluster delays alerts of others.

        No user name has blanks.
        """
        return self.owner or f"alerts of {self.body.get('cluster') or 'the daemon'}"

    @property
    def destination(self) -> str:
        """Return the destination for logs: the mail address, or only the host of a URL, since its path may be
        secret."""
        return self.to if self.channel == "mail" else host_of(urlsplit(self.to))


@dataclass(frozen=True, slots=True)
class AllowedRecipients:
    """The mail addresses and webhook hosts to which users may have notifications sent."""

    recipients: tuple[str, ...] = ()
    """Mail addresses, or whole domains (``@example.org``)."""
    hosts: frozenset[str] = field(default_factory=frozenset)
    """Hosts of webhooks, with the port if it is not that of https."""

    def mail_problem(self, address: str) -> str:
        """Return why a mail address is not allowed; empty if it is."""
        if not self.recipients:
            return "this daemon mails no users"
        if not ADDRESS.fullmatch(address):
            return "no mail address as name@example.org"
        allowed = {recipient.lower() for recipient in self.recipients}
        name, _, domain = address.lower().rpartition("@")
        return "" if {f"{name}@{domain}", f"@{domain}"} & allowed else "not one that this daemon may write to"

    def webhook_problem(self, url: str) -> str:
        """Return why a webhook URL is not allowed; empty if it is."""
        if not self.hosts:
            return "this daemon asks no webhooks of users"
        if problem := url_problem(url):
            return problem
        return "" if host_of(urlsplit(url)) in self.hosts else "not on a host that this daemon may ask"


def url_problem(url: str) -> str:
    """Return why a text is not a valid webhook URL; empty if it is."""
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
    """Return the host of a URL in lower case, with its port unless that is 443 for https: ``hooks.example.org``."""
    host = (url.hostname or "").lower()
    host = f"[{host}]" if ":" in host else host
    return host if url.port in (None, 443) and url.scheme == "https" else f"{host}:{url.port or PORTS[url.scheme]}"
