"""The section ``notifications`` of the configuration: recipients and delivery of notifications."""

from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from koalapy.config.types import must_match
from koalapy.model.alert import Severity
from koalapy.model.notification import ADDRESS, AllowedRecipients, host_of, url_problem
from koalapy.system.local_token import check_token
from koalapy.system.tls import is_this_machine

NO_ADDRESS = "is not a mail address: give one as koala@example.org"


def _check_recipient(text: str) -> str:
    """Return a mail address, or ``@DOMAIN``, unchanged. Raise ``ValueError`` for any other text."""
    if not ADDRESS.fullmatch(f"any{text}" if text.startswith("@") else text):
        raise ValueError(f"{text!r} {NO_ADDRESS}")
    return text


def _check_server(text: str) -> str:
    """Return ``HOST:PORT`` unchanged. Raise ``ValueError`` for any other text."""
    try:
        parts = urlsplit(f"//{text}")
        is_valid = parts.hostname and parts.port and text == parts.netloc and "@" not in text
    except ValueError:
        is_valid = None
    if not is_valid:
        raise ValueError(f"{text!r} is not a server: give host and port, as smtp.example.org:587")
    return text


def _check_host(text: str) -> str:
    """Return a host name with an optional port unchanged. Raise ``ValueError`` for any other text."""
    url = f"https://{text}"
    if url_problem(url) or host_of(urlsplit(url)) != text or "/" in text or "?" in text:
        raise ValueError(f"{text!r} is not a host: give its name in small letters, with a port unless it is 443")
    return text


def _check_url(text: str) -> str:
    """Return the URL of a webhook unchanged. Raise ``ValueError`` with its problem if it is not allowed."""
    if wrong := url_problem(text):
        raise ValueError(f"it is {wrong}")
    return text


Address = Annotated[str, must_match(ADDRESS.pattern, NO_ADDRESS)]
Recipient = Annotated[str, AfterValidator(_check_recipient)]
Host = Annotated[str, AfterValidator(_check_host)]
Url = Annotated[str, AfterValidator(_check_url)]
Secret = Annotated[str, AfterValidator(check_token)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True)
class MailSection:
    """The mail server and the sender of notifications by mail."""

    server: Annotated[str, AfterValidator(_check_server)]
    """Host and port of the mail server, as ``smtp.example.org:587``."""
    sender: Address
    """Address of the sender."""
    encryption: Literal["starttls", "tls", "none"] = "starttls"
    """Encryption of the connection: ``starttls`` after the greeting, or ``tls`` from the first byte. ``none`` is
    allowed without a password, or with a server on this machine."""
    user: str = ""
    """User name at the mail server; needs ``password``. By default the daemon does not log in."""
    password: str = field(default="", repr=False)
    """Password of ``user``."""
    recipients: list[Recipient] = field(default_factory=list)
    """Recipients that users may choose: addresses, and domains as ``@example.org``. By default users may choose
    none."""

    def __post_init__(self) -> None:
        if bool(self.user) != bool(self.password):
            raise ValueError("give user and password, or neither")
        if self.encryption == "none" and self.password and not is_this_machine(self.host):
            raise ValueError("the password would go over the network in clear: give encryption starttls or tls")

    @property
    def host(self) -> str:
        return urlsplit(f"//{self.server}").hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(f"//{self.server}").port or 25


@dataclass(frozen=True)
class WebhookSection:
    """A host that receives webhooks."""

    secret: Secret = field(repr=False)
    """Secret that signs the webhooks to this host (HMAC with SHA-256); 16 characters or more."""


@dataclass(frozen=True)
class OperatorsSection:
    """Recipients of alerts."""

    mail: list[Address] = field(default_factory=list)
    """Mail addresses that receive alerts; needs the section ``mail``."""
    webhooks: list[Url] = field(default_factory=list)
    """URLs that receive alerts; their hosts must be keys of ``notifications.webhooks``."""
    severity: Severity = Severity.WARNING
    """Lowest severity that is sent."""


@dataclass(frozen=True)
class NotificationSection:
    """Recipients and delivery of notifications. Without a mail server and webhook hosts none are sent."""

    mail: MailSection | None = None
    webhooks: dict[Host, WebhookSection] = field(default_factory=dict)
    """Hosts that may receive webhooks, with the port unless it is 443. No other host is contacted."""
    operators: OperatorsSection = OperatorsSection()
    waiting_after: Seconds = 3600.0
    """Seconds that a job must wait before its owner is notified (event ``waiting``)."""
    keep: Seconds = 86400.0
    """Seconds for which the delivery of a notification is retried."""
    per_hour: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Maximum notifications to each user per hour; the others are sent later."""
    waiting: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Maximum undelivered notifications of each user; further ones are dropped."""
    ca_file: str | None = None
    """PEM file with the certificate authorities that sign the certificates of mail servers and webhook hosts. By
    default those that this machine trusts."""

    def __post_init__(self) -> None:
        if self.operators.mail and self.mail is None:
            raise ValueError("operators.mail needs mail: say how it is sent")
        for url in self.operators.webhooks:
            if host_of(urlsplit(url)) not in self.webhooks:
                raise ValueError(
                    f"operators.webhooks: {host_of(urlsplit(url))} does not stand in webhooks, by its host"
                )

    @property
    def reachable(self) -> AllowedRecipients:
        """Return the recipients that users may choose."""
        return AllowedRecipients(tuple(self.mail.recipients) if self.mail else (), frozenset(self.webhooks))
