"""``koala limits``."""

import json
from collections.abc import Iterator, Sequence
from http.client import HTTPMessage

import pytest

from koalapy.client.client import _answer_to_error
from koalapy.client.errors import Exit
from koalapy.client.http import Answer
from koalapy.daemon.jobs.quota import LimitInUse, ScopeInUse
from koalapy.model.identity import Identity
from koalapy.model.limits import Limits, ShareLine
from tests.cli.conftest import Koala, Server


class FakeLimits:
    limits = Limits(contact="write to grid@example.org")

    async def read_limits(self, user: str) -> Sequence[ScopeInUse]:
        if user != "ada":
            return []
        user_limits = [LimitInUse("nodes", 64, 12), LimitInUse("bundle_bytes", 10**9, 2048.0)]
        shared = [LimitInUse("requests_per_second", 0.5, None), LimitInUse("node_hours_per_day", 100.0, 7.25)]
        return [ScopeInUse("user", "ada", user_limits), ScopeInUse("group", "physics", shared)]

    def read_shares(self, caller: Identity) -> list[ShareLine]:
        return [ShareLine("", "physics", 2.0, 1.0, 1.0, 12.5, 3), ShareLine("ada", "physics", 1.0, 1.0, 1.0, 12.5, 3)]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(limits=FakeLimits()) as server:
        yield server


def test_limits_prints_limits_and_use(koala: Koala) -> None:
    lines = koala("limits").out.splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["ada", "nodes", "12", "64"],
        ["ada", "bundle_bytes", "2.05", "KB", "1", "GB"],
        ["group", "physics", "requests_per_second", "-", "0.5"],
        ["group", "physics", "node_hours_per_day", "7.25", "100"],
    ]
    assert lines[-1] == "more: write to grid@example.org"
    assert json.loads(koala("limits", "--json").out)["scopes"][1]["name"] == "physics"


def test_share_prints_groups_and_users_with_targets(koala: Koala) -> None:
    assert [line.split() for line in koala("share").out.splitlines()[1:]] == [
        ["physics", "(all)", "2", "100.0", "%", "100.0", "%", "12.5", "3"],
        ["physics", "ada", "1", "100.0", "%", "100.0", "%", "12.5", "3"],
    ]


@pytest.mark.parametrize("option", [("--weight", "3"), ("--reason", "x")])
def test_share_with_weight_or_reason_needs_user(koala: Koala, option: tuple[str, str]) -> None:
    answer = koala("share", *option)
    assert (answer.code, answer.out) == (Exit.USAGE, "")
    assert "give --user" in answer.err


def test_limits_of_unlimited_user_says_so(koala: Koala) -> None:
    assert koala("limits", "--user", "bob").out == "nothing is limited of bob\n"


@pytest.mark.parametrize(("code", "may_recover"), [("rate-limit-exceeded", True), ("limit-exceeded", False)])
def test_rejection_by_rate_limit_may_recover(code: str, may_recover: bool) -> None:
    body = json.dumps({"status": 429, "detail": "the limit requests_per_second of ada is 1", "code": code}).encode()
    headers = HTTPMessage()
    headers["Retry-After"] = "1"
    assert _answer_to_error(Answer(429, headers, body)).may_recover is may_recover
