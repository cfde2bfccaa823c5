"""User names reserved for the daemon, and addresses at which its account's commands may send their token."""

import os
import pwd
import socket
from typing import Any

import pytest

from koalapy.config.settings import Settings
from koalapy.daemon.access import check_reserved_names, reachable_addresses, reserved_names
from koalapy.model.errors import UsageError

OIDC = {"issuer": "https://sso.example.org", "audience": "koala", "jwks_file": "/keys"}


def given_to(user: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("tokens[0].user", {"tokens": [{"token": "0123456789abcdef", "user": user}]}),
        (f"users.{user}", {"users": {user: {}}}),
        ("oidc.users.5f1c", {"oidc": OIDC | {"users": {"5f1c": user}}}),
    ]


def test_check_reserved_names_with_reserved_user_raises_usage_error() -> None:
    account = pwd.getpwuid(os.geteuid()).pw_name
    assert reserved_names() == {account, "koala"}
    for user in reserved_names():
        for field, values in given_to(user):
            with pytest.raises(UsageError) as refusal:
                check_reserved_names(Settings(**values))
            assert (refusal.value.field, refusal.value.value) == (field, user)


def test_check_reserved_names_with_other_users_accepts() -> None:
    for _, values in given_to("alice"):
        check_reserved_names(Settings(**values))


@pytest.mark.parametrize(("only", "hosts"), [(0, {"::", "127.0.0.1", "::1"}), (1, {"::", "::1"})])
def test_reachable_addresses_with_ipv6_only_omit_ipv4_loopback(only: int, hosts: set[str]) -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        listener.bind(("::", 0))
        assert {host for host, _ in reachable_addresses(listener)} == hosts
