"""The section ``notifications`` of the configuration: who may be told of what, and how that is sent."""

from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from koalapy.model.alert import Severity
from koalapy.model.notification import ADDRESS, AllowedRecipients, host_of, url_problem
from koalapy.system.local_token import check_token
from koalapy.system.tls import is_this_machine


def _address(text: str) -> str:
    if not ADDRESS.fullmatch(text):
        raise ValueError(f"{text!r} is no mail address: give one as koala@example.org")
    return text


def _recipient(text: str) -> str:
    _address(f"any{text}" if text.startswith("@") else text)
    return text


def _server(text: str) -> str:
    try:
        parts = urlsplit(f"//{text}")
        known = parts.hostname and parts.port and text == parts.netloc and "@" not in text
    except ValueError:
        known = None
    if not known:
        raise ValueError(f"{text!r} is no server: give host and port, as smtp.example.org:587")
    return text


def _host(text: str) -> str:
    url = f"https://{text}"
    if url_problem(url) or host_of(urlsplit(url)) != text or "/" in text or "?" in text:
        raise ValueError(f"{text!r} is no host: give its name in small letters, with a port unless it is 443")
    return text


def _url(text: str) -> str:
    if wrong := url_problem(text):
        raise ValueError(f"it is {wrong}")
    return text


Address = Annotated[str, AfterValidator(_address)]
Recipient = Annotated[str, AfterValidator(_recipient)]
Host = Annotated[str, AfterValidator(_host)]
Url = Annotated[str, AfterValidator(_url)]
Secret = Annotated[str, AfterValidator(check_token)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True)
class MailSection:
    """How mail is sent."""

    server: Annotated[str, AfterValidator(_server)]
    """Host and port of the server that takes it."""
    sender: Address
    """Whose it is."""
    encryption: Literal["starttls", "tls", "none"] = "starttls"
    """``starttls`` after the greeting, ``tls`` from the first byte; ``none`` without a password only, or on this
    machine."""
    user: str = ""
    """By which the server knows the daemon, where it asks for that."""
    password: str = field(default="", repr=False)
    """With that."""
    recipients: list[Recipient] = field(default_factory=list)
    """Whom users may have mailed: addresses, and domains as ``@example.org``. Without any, nobody."""

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
    """A host that is asked by webhooks."""

    secret: Secret = field(repr=False)
    """By which what it is told is signed (HMAC with SHA-256)."""


@dataclass(frozen=True)
class OperatorsSection:
    """Who is told of alerts."""

    mail: list[Address] = field(default_factory=list)
    """Mail addresses."""
    webhooks: list[Url] = field(default_factory=list)
    """URLs, on hosts that stand in ``notifications.webhooks``."""
    severity: Severity = Severity.WARNING
    """The least of which they are told."""


@dataclass(frozen=True)
class NotificationSection:
    """Who may be told of what, and how: without a mail server and hosts of webhooks nobody is told anything."""

    mail: MailSection | None = None
    webhooks: dict[Host, WebhookSection] = field(default_factory=dict)
    """By host, with the port unless it is 443: no other is asked."""
    operators: OperatorsSection = OperatorsSection()
    waiting_after: Seconds = 3600.0
    """For how long a job has waited when that is told."""
    keep: Seconds = 86400.0
    """For how long it is tried to tell something."""
    per_hour: Annotated[int, Field(ge=1, le=100_000)] = 200
    """How much each user is told in an hour; what is more comes later."""
    waiting: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """How much may wait to be told each user; what is more is told nobody."""
    ca_file: str | None = None
    """Certificates of authorities that servers and hosts are known by, in PEM; by default those that this machine
    trusts."""

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
        """By users."""
        return AllowedRecipients(tuple(self.mail.recipients) if self.mail else (), frozenset(self.webhooks))
