"""User names reserved for the daemon, which the configuration must not assign."""

import os
import pwd
from typing import Any

import pytest

from koalapy.config.settings import Settings
from koalapy.daemon.access import check_reserved_names, reserved_names
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
