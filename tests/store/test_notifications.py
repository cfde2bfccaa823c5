"""Undelivered notifications in every database."""

from dataclasses import replace

from koalapy.model.notification import Notification
from koalapy.store.opening import Stores
from koalapy.store.records import Batch
from tests.store.conftest import OpenAll

FIRST = Notification(1, 5.5, "mail", "ada@example.org", "ada", {"event": "begin", "job": 12, "name": "größe"})
SECOND = Notification(2, 6.5, "webhook", "https://hooks.example.org/x", "", {"alert": {"kind": "disk"}}, 3, 90.25)


def test_notifications_are_read_by_next_daemon(open_stores: OpenAll) -> None:
    stores = open_stores()
    stores.notifications.save_notifications([SECOND])
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, notifications=[FIRST]))
    assert open_stores().notifications.notifications() == [FIRST, SECOND]


def test_notifications_are_replaced_and_removed_by_id(stores: Stores) -> None:
    stores.notifications.save_notifications([FIRST, SECOND])
    stores.notifications.save_notifications([tried := replace(FIRST, tries=1, next_at=50.0)])
    stores.notifications.remove_notifications([2, 7])
    assert stores.notifications.notifications() == [tried]
