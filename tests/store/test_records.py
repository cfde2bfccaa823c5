"""Tokens, notifications and bundles in every database: written, read by the next daemon, replaced and removed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from koalapy.model.notification import Notification
from koalapy.store.opening import Stores
from koalapy.store.records import StoredBundle, StoredToken
from tests.store.conftest import OpenAll
from tests.store.jobs import make_batch

TOKEN = StoredToken(1, "a" * 64, "alice", "user", "alice on north", "", 1000.0, "alice")
NOTE = Notification(1, 5.5, "mail", "ada@example.org", "ada", {"event": "begin", "job": 12, "name": "größe"})
BUNDLE = StoredBundle("a" * 64, 2**33, 3, 5.0)


@dataclass(frozen=True)
class Kind:
    """Two records of a store, a changed form of the first, and the calls that read, write and remove them."""

    first: Any
    second: Any
    changed: Any
    read: Callable[[Stores], Any]
    save: Callable[[Stores, list[Any]], None]
    remove: Callable[[Stores, Any], None]


KINDS = {
    "tokens": Kind(
        TOKEN,
        StoredToken(2, "b" * 64, "bob", "admin", "", "for CI", 1001.0, "root", 5000.0, 1002.0, 1003.0, made_by=1),
        replace(TOKEN, revoked_at=2000.0),
        lambda stores: stores.tokens.tokens(),
        lambda stores, tokens: stores.tokens.save_tokens(tokens),
        lambda stores, token: stores.tokens.remove_tokens([token, *range(7, 1300)]),
    ),
    "notifications": Kind(
        NOTE,
        Notification(2, 6.5, "webhook", "https://hooks.example.org/x", "", {"alert": {"kind": "disk"}}, 3, 90.25),
        replace(NOTE, tries=1, next_at=50.0),
        lambda stores: stores.notifications.notifications(),
        lambda stores, notes: stores.notifications.save_notifications(notes),
        lambda stores, note: stores.notifications.remove_notifications([note, 7]),
    ),
    "bundles": Kind(
        BUNDLE,
        StoredBundle("b" * 64, 1, 1, 6.0, ("ada", "bob")),
        replace(BUNDLE, used_at=7.0),
        lambda stores: sorted(stores.files.bundles(), key=lambda bundle: bundle.id),
        lambda stores, bundles: stores.files.save_bundles(bundles),
        lambda stores, bundle: stores.files.remove_bundle(bundle),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_records_are_read_by_next_daemon_replaced_and_removed(open_stores: OpenAll, name: str) -> None:
    kind = KINDS[name]
    kind.save(open_stores(), [kind.second, kind.first])
    stores = open_stores()
    assert kind.read(stores) == [kind.first, kind.second]
    kind.save(stores, [kind.changed])
    assert kind.read(stores) == [kind.changed, kind.second]
    kind.remove(stores, kind.second.id)
    kind.remove(stores, kind.second.id)
    assert kind.read(stores) == [kind.changed]


def test_remove_tokens_deletes_more_than_one_query_names(stores: Stores) -> None:
    stores.tokens.save_tokens([replace(TOKEN, id=number, digest=f"{number}") for number in range(1, 1203)])
    stores.tokens.remove_tokens(range(1, 1201))
    assert [token.id for token in stores.tokens.tokens()] == [1201, 1202]


def test_notifications_are_written_with_a_batch(stores: Stores) -> None:
    stores.jobs.write(make_batch(notifications=[NOTE]))
    assert stores.notifications.notifications() == [NOTE]
