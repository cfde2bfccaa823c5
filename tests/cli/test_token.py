"""``koala token``: made and printed, listed, revoked."""

import json
from collections.abc import Iterator

import pytest

from koalapy.api.tokens import TokenView
from tests.cli.conftest import TOKEN, Koala, Server
from tests.identities import administrators
from tests.memory_stores import memory_stores


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.identities = administrators(TOKEN, store=memory_stores().tokens)
    server.start()
    yield server
    server.end()


def test_a_token_is_made_and_lets_in(koala: Koala, server: Server) -> None:
    made = koala("token", "create", "--user", "alice", "--role", "user", "--expires", "8h", "--note", "for CI")
    assert made.code == 0
    token = made.out.strip()
    assert token.startswith("koala_")
    assert "token 1 of alice, user, holds until" in made.err
    assert token not in made.err
    assert koala("queue", "--token", token).code == 0
    listed = koala("token", "list")
    assert token not in listed.out
    assert [line.split()[:4] for line in listed.out.splitlines()[1:]] == [["1", "alice", "user", "ada"]]
    assert "for CI" in listed.out
    assert koala("token", "revoke", "1").out == "token 1 of alice is revoked\n"
    refused = koala("queue", "--token", token)
    assert (refused.code, "KOALA_TOKEN" in refused.err) == (4, True)
    assert "REVOKED" in koala("token", "list", "--all", "--user", "alice").out


def test_quiet_prints_the_token_and_nothing_else(koala: Koala) -> None:
    made = koala("token", "create", "-q", "--expires", "never")
    assert (len(made.out.splitlines()), made.err) == (1, "")
    assert json.loads(koala("token", "list", "--json").out)["tokens"][0]["expires_at"] is None


def test_programs_are_told_all(koala: Koala) -> None:
    made = json.loads(koala("token", "create", "--json").out)
    assert made.keys() == {*TokenView.model_fields, "token"}


def test_all_are_revoked_only_when_that_is_said(koala: Koala) -> None:
    for _ in range(2):
        koala("token", "create", "-q")
    for words in ((), ("1", "--all")):
        assert koala("token", "revoke", *words).code == 2
    assert len(koala("token", "revoke", "--all").out.splitlines()) == 2
    assert koala("queue").code == 0


def test_what_is_no_role_or_time_is_refused(koala: Koala) -> None:
    assert koala("token", "create", "--role", "god").code == 2
    assert koala("token", "create", "--expires", "soon").code == 2
    assert koala("token", "revoke", "7").code == 3


def test_that_there_are_none_is_told(koala: Koala) -> None:
    ended = koala("token", "list", "--user", "nobody")
    assert (ended.code, len(ended.out.splitlines()), ended.err) == (0, 1, "koala: there are no tokens of nobody\n")
    assert koala("token", "list", "--json").err == ""
