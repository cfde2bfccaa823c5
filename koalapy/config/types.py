"""Constrained types of the configuration; a value that violates a constraint raises ``ValueError``."""

import re
from ipaddress import ip_address, ip_network
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from koalapy.model.job import NO_LEASE
from koalapy.model.job_spec import MAX_DURATION
from koalapy.model.request import MAX_CLUSTER_NAME_LENGTH
from koalapy.system.local_token import check_token

Secret = Annotated[str, AfterValidator(check_token)]


def must_match(pattern: str, problem: str) -> AfterValidator:
    """Return a validator of texts that match a pattern as a whole. ``problem`` follows another text in the message."""

    def check_text(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} {problem}")
        return text

    return AfterValidator(check_text)


HostName = Annotated[
    str,
    must_match(r"[\w-]+(\.[\w-]+)*\.?", "is not a host's name: give it without scheme and port, as grid.example.org"),
]


def _check_network(text: str) -> str:
    """Return the name of an interface or a network unchanged. Raise ``ValueError`` for an invalid network."""
    if "/" in text:
        ip_network(text, strict=False)
    return text


Network = Annotated[str, AfterValidator(_check_network)]
"""Name of a network interface, or a network in CIDR notation."""


def parse_proxy(text: str) -> str:
    """Return an IP address or network unchanged. Raise ``ValueError`` for any other text."""
    try:
        ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is neither an IP address nor a network, as 192.0.2.7 or 192.0.2.0/24") from None
    return text


Proxy = Annotated[str, AfterValidator(parse_proxy)]


def _check_order(ports: str) -> str:
    """Return a range of ports unchanged. Raise ``ValueError`` if it is empty or has privileged ports."""
    first, last = map(int, ports.split("-"))
    if not 1024 <= first < last <= 65535:
        raise ValueError(f"{ports} is not a range of ports: give FIRST-LAST with 1024 <= FIRST < LAST <= 65535")
    return ports


Ports = Annotated[str, Field(pattern=r"^\d+-\d+$"), AfterValidator(_check_order)]


AbsolutePath = Annotated[str, must_match(r"(?s)/.*", "is not an absolute path")]
UserName = Annotated[str, must_match(r"[\w.+-]{1,100}", "is not a user's name: give letters, digits, and . _ + - only")]


def _cluster_name(name: str) -> str:
    """Return a cluster name unchanged.

    Raise ``ValueError`` if it is not safe in paths, addresses, lists and ``NAME:SIZE``.
    """
    if not re.fullmatch(rf"[^\W_][\w.-]{{0,{MAX_CLUSTER_NAME_LENGTH - 1}}}", name):
        hint = f"give 1 to {MAX_CLUSTER_NAME_LENGTH} letters, digits, and . _ - only, the first a letter or digit"
        raise ValueError(f"{name[:MAX_CLUSTER_NAME_LENGTH]!r} is not a cluster's name: {hint}")
    return name


ClusterKey = Annotated[str, AfterValidator(_cluster_name)]


def _provider_uri(uri: str) -> str:
    """Return an https address, or an http address of this machine. Raise ``ValueError`` for any other."""
    parts = urlsplit(uri)
    host = parts.hostname or ""
    if parts.scheme == "http" and (host == "localhost" or (is_address(host) and ip_address(host).is_loopback)):
        return uri
    if parts.scheme != "https" or not host:
        raise ValueError(f"{uri} is not an https address, so its answers could be forged")
    return uri


ProviderUri = Annotated[str, AfterValidator(_provider_uri)]


def is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _one_group(pattern: str) -> str:
    """Return a regular expression with one group unchanged. Raise ``ValueError`` for any other text."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    if groups != 1:
        raise ValueError(f"{pattern!r} must have one group, which is the user: (.+)@example\\.org")
    return pattern


UserPattern = Annotated[str, AfterValidator(_one_group)]
"""A regular expression with one group, which extracts the user name."""


def _check_lease(value: object) -> object:
    """Return ``NO_LEASE`` for ``none``, and any other value as it is."""
    if value == "none":
        return NO_LEASE
    if isinstance(value, int | float) and value <= 0:
        raise ValueError("give more than 0 seconds, or none")
    return value


LeaseSetting = Annotated[float, BeforeValidator(_check_lease), Field(ge=0, le=MAX_DURATION, allow_inf_nan=False)]
