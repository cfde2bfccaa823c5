"""Login tokens in every database."""

from dataclasses import replace

from koalapy.store.opening import Stores
from koalapy.store.records import StoredToken
from tests.store.conftest import OpenAll

FIRST = StoredToken(1, "a" * 64, "alice", "user", "alice on north", "", 1000.0, "alice")
SECOND = StoredToken(2, "b" * 64, "bob", "admin", "", "for CI", 1001.0, "root", 5000.0, 1002.0, 1003.0, made_by=1)


def test_tokens_are_read_by_next_daemon(open_stores: OpenAll) -> None:
    open_stores().tokens.save_tokens([SECOND, FIRST])
    assert open_stores().tokens.tokens() == [FIRST, SECOND]


def test_saved_token_replaces_same_id(stores: Stores) -> None:
    stores.tokens.save_tokens([FIRST, SECOND])
    stores.tokens.save_tokens([revoked := replace(FIRST, revoked_at=2000.0)])
    assert stores.tokens.tokens() == [revoked, SECOND]


def test_remove_tokens_deletes_by_id(stores: Stores) -> None:
    stores.tokens.save_tokens([replace(FIRST, id=number, digest=f"{number}") for number in range(1, 1203)])
    stores.tokens.remove_tokens(range(1, 1201))
    assert [token.id for token in stores.tokens.tokens()] == [1201, 1202]
    stores.tokens.remove_tokens([7])
