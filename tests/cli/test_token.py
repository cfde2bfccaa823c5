"""``koala token``: create, list and revoke tokens."""

import json
from collections.abc import Iterator

import pytest

from koalapy.api.tokens import TokenView
from tests.cli.conftest import TOKEN, Koala, Server
from tests.identities import administrators
from tests.memory_stores import memory_stores


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(identities=administrators(TOKEN, store=memory_stores().tokens)) as server:
        yield server


def test_token_create_gives_access_until_revoked(koala: Koala, server: Server) -> None:
    result = koala("token", "create", "--user", "alice", "--role", "user", "--expires", "8h", "--note", "for CI")
    assert result.code == 0
    token = result.out.strip()
    assert token.startswith("koala_")
    assert "token 1 of alice, user, holds until" in result.err
    assert token not in result.err
    assert koala("queue", "--token", token).code == 0
    listed = koala("token", "list")
    assert token not in listed.out
    assert [line.split()[:4] for line in listed.out.splitlines()[1:]] == [["1", "alice", "user", "ada"]]
    assert "for CI" in listed.out
    assert koala("token", "revoke", "1").out == "token 1 of alice is revoked\n"
    refused = koala("queue", "--token", token)
    assert (refused.code, "KOALA_TOKEN" in refused.err) == (4, True)
    assert "REVOKED" in koala("token", "list", "--all", "--user", "alice").out


def test_token_create_quiet_prints_token_only(koala: Koala) -> None:
    result = koala("token", "create", "-q", "--expires", "never")
    assert (len(result.out.splitlines()), result.err) == (1, "")
    assert json.loads(koala("token", "list", "--json").out)["tokens"][0]["expires_at"] is None


def test_token_create_json_has_all_fields(koala: Koala) -> None:
    token = json.loads(koala("token", "create", "--json").out)
    assert token.keys() == {*TokenView.model_fields, "token"}


def test_token_revoke_needs_numbers_or_all(koala: Koala) -> None:
    for _ in range(2):
        koala("token", "create", "-q")
    for arguments in ((), ("1", "--all")):
        assert koala("token", "revoke", *arguments).code == 2
    assert len(koala("token", "revoke", "--all").out.splitlines()) == 2
    assert koala("queue").code == 0


def test_token_list_without_tokens_says_so(koala: Koala) -> None:
    ended = koala("token", "list", "--user", "nobody")
    assert (ended.code, len(ended.out.splitlines()), ended.err) == (0, 1, "koala: there are no tokens of nobody\n")
    assert koala("token", "list", "--json").err == ""
