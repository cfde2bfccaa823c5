"""Queue notifications in the store until they are delivered, and retry with growing pauses in the background."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from koalapy.config.notifications import NotificationSection
from koalapy.daemon.alerts.notification_channels import DeliveryFailed, Mail, Sender, Webhooks
from koalapy.daemon.alerts.notification_events import (
    build_alert_body,
    build_job_body,
    build_test_body,
    list_recipients,
    requested_events,
    waits_since,
)
from koalapy.daemon.engine.database import query
from koalapy.model.alert import Alert, Severity
from koalapy.model.errors import BusyError, ConflictError, LeaseLost, StoreUnavailable, UsageError
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import MailType
from koalapy.model.notification import Channel, Notification
from koalapy.model.throttle import Throttle
from koalapy.store.service_tables import NotificationStore
from koalapy.system.event_loop import iterate_in_slices
from koalapy.system.tls import Trust

log = structlog.get_logger()

FIRST_PAUSE, MAX_PAUSE = 5.0, 3600.0
"""Seconds before the first retry, doubled for each further one, up to the maximum."""
MAX_WAITING = 20_000
"""Maximum number of undelivered notifications of all users together."""
MIN_PAUSE = 0.05
"""Minimum seconds between two passes over the queue."""
MAX_PER_USER, MAX_PER_SERVER = 2, 4
"""Maximum number of deliveries at the same time of one user, and to one mail server or host of webhooks.

Those for operators are counted apart. Together they do not exceed ``MAX_HANGING`` mails.
"""
SLICE = 200
"""Jobs that are examined before other tasks run."""
TEST_INTERVAL_S = 30.0
"""Minimum seconds between two tests of a channel."""
MAX_TESTED = 8
"""Maximum number of recipients of a test, the first ones."""
LOOK_INTERVAL = 30.0
"""Seconds between two searches for jobs that wait for long."""


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """The result of a test notification to one recipient."""

    channel: Channel
    to: str
    """The mail address, or the host of the webhook, since its path may be secret."""
    delivered: bool
    answer: str
    """The answer of the mail server or webhook, or the error."""


class Notifications:
    """The queue of undelivered notifications, and their delivery."""

    def __init__(
        self,
        store: NotificationStore,
        senders: Mapping[Channel, Sender],
        section: NotificationSection,
        clock: Callable[[], float],
        jobs: Callable[[], Sequence[Job]],
    ) -> None:
        self._store, self._senders, self._section = store, senders, section
        self._clock, self._jobs = clock, jobs
        self._waiting: dict[int, Notification] = {}
        self._queues: dict[tuple[str, str], dict[int, None]] = {}
        """Ids by recipient and source: each recipient gets those of a source in order, however many retries one
        needs."""
        self._count_by_source: Counter[str] = Counter()
        self._last_id = 0
        for notification in store.notifications():
            self._add_to_queue(notification)
            self._last_id = notification.id
        self._rate_limit = Throttle(section.per_hour, 3600 / section.per_hour)
        self._test_limit = Throttle(1, TEST_INTERVAL_S)
        self._paced: set[int] = set()
        """Notifications that the rate limit has let through once; their retries are not counted again."""
        self._deliveries: dict[str, asyncio.Task[None]] = {}
        """The running delivery of each recipient; one at a time."""
        self._running: Counter[tuple[str, str]] = Counter()
        """The number of running deliveries by each key of ``_limits_of``."""
        self._finished_ids: set[int] = set()
        """Ids of finished notifications that must still be removed from the store."""
        self._wake = asyncio.Event()
        self._looked_at = clock()
        self._task: asyncio.Task[None] | None = None
        self._saving: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """Held while the store is changed, so that changes are made in order."""

    # Create notifications

    def make_notifications(self, job: Job, previous_state: JobState | None, now: float) -> list[Notification]:
        """Return the notifications of a job's change. The caller stores them with the job, then calls
        ``send_notifications``."""
        return [
            notification
            for event in requested_events(job, previous_state)
            for notification in self._make_for_job(event, job, now)
        ]

    def _make_for_job(self, event: MailType, job: Job, now: float) -> list[Notification]:
        if not self._has_capacity(job.spec.owner):
            return []
        body = build_job_body(event, job, now)
        return [self._make_notification(channel, to, job.spec.owner, body, now) for channel, to in list_recipients(job)]

    def _has_capacity(self, source: str) -> bool:
        """Check whether another notification of a source may wait for delivery. Log if it must be dropped."""
        has_capacity = self._count_by_source[source] < self._section.waiting and len(self._waiting) < MAX_WAITING
        if not has_capacity:
            log.warning(
                "a notification is dropped: too many wait for delivery", action="notification-dropped", user=source
            )
        return has_capacity

    def _make_notification(
        self, channel: Channel, to: str, owner: str, body: dict[str, Any], now: float
    ) -> Notification:
        self._last_id += 1
        return Notification(self._last_id, now, channel, to, owner, body)

    def send_notifications(self, notifications: Iterable[Notification]) -> None:
        """Queue notifications for delivery; the caller has stored them, or stores them afterwards."""
        for notification in notifications:
            self._add_to_queue(notification)
        self._wake.set()

    def _add_to_queue(self, notification: Notification) -> None:
        self._waiting[notification.id] = notification
        self._queues.setdefault((notification.to, notification.source), {})[notification.id] = None
        self._count_by_source[notification.source] += 1

    def alert_changed(self, alert: Alert, begins: bool) -> None:
        """Notify operators of an alert that begins or ends, unless it is silenced.

        It is sent before it is stored, since the alert may be about the store.
        """
        if alert.is_silenced:
            return
        operators, now = self._section.operators, self._clock()
        if operators.severity is Severity.CRITICAL and alert.severity is not Severity.CRITICAL:
            return
        body = build_alert_body(alert, now, begins=begins)
        notifications = [
            self._make_notification(channel, to, "", body, now)
            for channel, recipients in self._recipients().items()
            for to in recipients
        ]
        if notifications and self._has_capacity(notifications[0].source):
            self.send_notifications(notifications)
            self._store_in_background(notifications)

    def count_recipients(self) -> dict[Channel, int]:
        """Return the number of operators' recipients of each channel that has some."""
        return {channel: len(recipients) for channel, recipients in self._recipients().items() if recipients}

    def _recipients(self) -> dict[Channel, Sequence[str]]:
        """Return the operators' recipients by channel."""
        operators = self._section.operators
        return {"mail": operators.mail, "webhook": operators.webhooks}

    async def send_test(self, channel: Channel, user: str) -> list[DeliveryResult]:
        """Send a test notification to the operators' configured recipients of a channel now, once, past the queue.

        Raise ``ConflictError`` if none is configured, ``BusyError`` if the last test was less than
        ``TEST_INTERVAL_S`` ago.
        """
        sender, recipients, now = self._senders.get(channel), self._recipients()[channel], self._clock()
        if sender is None or not recipients:
            setting = f"notifications.operators.{'mail' if channel == 'mail' else 'webhooks'}"
            raise ConflictError(f"no {channel} is configured for operators", field="channel", hint=f"set {setting}")
        if wait := self._test_limit.count_if_allowed(channel, now):
            hint = f"try again in {wait:.0f} s"
            raise BusyError(f"the {channel} was tested a moment ago", retry_after=wait, hint=hint)
        tests = [
            Notification(0, now, channel, recipient, "", build_test_body(user, now))
            for recipient in recipients[:MAX_TESTED]
        ]
        return list(await asyncio.gather(*(self._test_recipient(sender, test) for test in tests)))

    async def _test_recipient(self, sender: Sender, test: Notification) -> DeliveryResult:
        """Send a test notification, and return the result."""
        try:
            answer, is_delivered = await self._deliver_through(sender, test), True
        except DeliveryFailed as error:
            answer, is_delivered = str(error), False
        log.info("a notification was tested", action="notification-tested", to=test.destination, answer=answer)
        return DeliveryResult(test.channel, test.destination, is_delivered, answer)

    async def notify_long_waits(self) -> None:
        """Notify owners of the jobs that have become long-waiting since the last call."""
        last_look, self._looked_at = self._looked_at, self._clock()
        notifications: list[Notification] = []
        async for jobs in iterate_in_slices(self._jobs(), SLICE):
            for job in jobs:
                since = waits_since(job)
                if since is not None and last_look < since + self._section.waiting_after <= self._looked_at:
                    notifications += self._make_for_job(MailType.WAITING, job, self._looked_at)
        if notifications:
            self.send_notifications(notifications)
            self._store_in_background(notifications)

    # Deliver notifications

    def start(self) -> None:
        self._task = asyncio.create_task(self._run_deliveries(), name="notifications")

    async def stop(self) -> None:
        """Stop the delivery; the next daemon run delivers the undelivered notifications from the store."""
        tasks = [task for task in (self._task, *self._deliveries.values(), *self._saving) if task is not None]
        for task in (self._task, *self._deliveries.values()):
            if task is not None:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_deliveries(self) -> None:
        """Start deliveries when they are due, until cancelled."""
        while True:
            pause = self._start_due_deliveries()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            await asyncio.sleep(MIN_PAUSE)  # Collect further wake-ups: there may be many recipients.
            self._wake.clear()

    def _start_due_deliveries(self) -> float | None:
        """Start the deliveries that are due; return the seconds until the next one is due, None if there is none."""
        now, next_at = self._clock(), None
        for (recipient, source), ids in self._queues.items():
            if recipient in self._deliveries:
                continue
            notification = self._waiting[next(iter(ids))]
            is_paced = notification.id in self._paced
            due = max(notification.next_at, now + (0.0 if is_paced else self._rate_limit.wait_time(source, now)))
            if due > now:
                next_at = due if next_at is None else min(next_at, due)
            elif all(self._running[key] < limit for key, limit in _limits_of(notification)):
                if not is_paced:
                    self._paced.add(notification.id)
                    self._rate_limit.count(source, now)
                self._running.update(key for key, _ in _limits_of(notification))
                self._deliveries[recipient] = asyncio.create_task(self._attempt_delivery(notification))
        return None if next_at is None else max(0.0, next_at - now)

    async def _attempt_delivery(self, notification: Notification) -> None:
        """Try to deliver once. Schedule a retry after a failure, or drop it if that is permanent or it is too old."""
        fields = {
            "channel": notification.channel,
            "to": notification.destination,
            "what": notification.body.get("event"),
            "job": notification.body.get("job"),
        }
        # The pause before a retry is set first, so that it applies however this try ends.
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(notification.tries, 20))
        retried = replace(notification, tries=notification.tries + 1, next_at=self._clock() + pause)
        self._waiting[notification.id] = retried
        try:
            if (reason := self._rejection_reason(notification)) or (
                sender := self._senders.get(notification.channel)
            ) is None:
                raise DeliveryFailed(reason or "this daemon does not send such any more", for_good=True)
            await self._deliver_through(sender, notification)
        except DeliveryFailed as error:
            if error.is_permanent or self._clock() - notification.at >= self._section.keep:
                log.warning("a notification is given up", action="notification-failed", reason=str(error), **fields)
                self._finish_delivery(notification)
            else:
                log.info("a notification is tried again", action="notification-retried", reason=str(error), **fields)
                self._store_in_background([retried])
        else:
            log.info("notification sent", action="notified", **fields)
            self._finish_delivery(notification)
        finally:
            self._deliveries.pop(notification.to, None)
            self._running -= Counter(key for key, _ in _limits_of(notification))
            self._wake.set()

    def _rejection_reason(self, notification: Notification) -> str:
        """Return why the present configuration forbids a notification; empty if it allows it."""
        reachable, operators = self._section.reachable, self._section.operators
        if not notification.owner:
            return (
                ""
                if notification.to in (*operators.mail, *operators.webhooks)
                else "operators no longer receive this notification"
            )
        return (
            reachable.mail_problem(notification.to)
            if notification.channel == "mail"
            else reachable.webhook_problem(notification.to)
        )

    def _finish_delivery(self, notification: Notification) -> None:
        """Remove a delivered or dropped notification from memory, and from the store in the background."""
        del self._waiting[notification.id]
        queue, source = (notification.to, notification.source), notification.source
        del self._queues[queue][notification.id]
        if not self._queues[queue]:
            del self._queues[queue]
        self._paced.discard(notification.id)
        self._count_by_source[source] -= 1
        if not self._count_by_source[source]:
            del self._count_by_source[source]
        self._finished_ids.add(notification.id)
        self._store_in_background([])

    # Store notifications

    def _store_in_background(self, changed: Iterable[Notification]) -> None:
        """Store changed notifications in the background.

        If that fails, they are still delivered, or delivered again after a restart.
        """
        saving = asyncio.create_task(self._store_changes(list(changed)))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)

    async def _store_changes(self, changed: list[Notification]) -> None:
        """Store changed notifications and remove finished ones. Log a failure; later calls retry the removals."""
        async with self._turn:
            try:
                # Notifications that were delivered in the meantime must not be stored again.
                if undelivered := [notification for notification in changed if notification.id in self._waiting]:
                    await query(self._store.save_notifications, undelivered)
                if finished := frozenset(self._finished_ids):
                    await query(self._store.remove_notifications, finished)
                    self._finished_ids -= finished
            except (StoreUnavailable, LeaseLost) as error:
                log.warning(
                    "undelivered notifications could not be stored",
                    action="notifications-not-kept",
                    error=error.message,
                )

    @staticmethod
    async def _deliver_through(sender: Sender, notification: Notification) -> str:
        """Deliver a notification and return the answer. Raise ``DeliveryFailed`` for unexpected errors as well, so that
        retries end."""
        try:
            return await sender.deliver_notification(notification)
        except DeliveryFailed:
            raise
        except Exception as error:
            log.error(
                "sending a notification failed by an internal error", action="notification-broken", exc_info=error
            )
            raise DeliveryFailed(f"internal error: {type(error).__name__}") from error


def _limits_of(notification: Notification) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield what limits the deliveries at the same time: a key by which they are counted, and the maximum."""
    if notification.owner:
        yield ("user", notification.owner), MAX_PER_USER
    server = "mail" if notification.channel == "mail" else notification.destination
    yield ("users" if notification.owner else "operators", server), MAX_PER_SERVER


def build_notifications(
    section: NotificationSection,
    store: NotificationStore,
    clock: Callable[[], float],
    jobs: Callable[[], Sequence[Job]],
) -> Notifications:
    """Return the notifications with the configured channels.

    Raise ``UsageError`` if ``notifications.ca_file`` cannot be read.
    """
    if section.mail is None and not section.webhooks:
        return Notifications(store, {}, section, clock, jobs)  # to load this machine's certificates takes 30 ms
    try:
        context = Trust(Path(section.ca_file) if section.ca_file else None).create_context()
    except OSError as error:
        raise UsageError(
            f"notifications.ca_file: {error}",
            field="notifications.ca_file",
            value=section.ca_file,
            hint="give a file with certificates in PEM, or leave it out",
        ) from error
    senders: dict[Channel, Sender] = {}
    if section.mail is not None:
        senders["mail"] = Mail(section.mail, context)
    if section.webhooks:
        secrets = {host: webhook.secret for host, webhook in section.webhooks.items()}
        senders["webhook"] = Webhooks(secrets, context)
    return Notifications(store, senders, section, clock, jobs)
