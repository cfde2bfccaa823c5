"""Queue notifications in the store until they are delivered, and retry with growing pauses in the background."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from koalapy.config.notifications import NotificationSection
from koalapy.daemon.alerts.notification_channels import Mail, NotTold, Sender, Webhooks
from koalapy.daemon.alerts.notification_events import happened, of_alert, of_job, places, waits_since
from koalapy.daemon.engine.database import query
from koalapy.model.alert import Alert, Severity
from koalapy.model.errors import LeaseLost, StoreUnavailable, UsageError
from koalapy.model.job import Job, JobState
from koalapy.model.notification import Channel, MailType, Notification
from koalapy.model.throttle import Throttle
from koalapy.ports import NotificationStore
from koalapy.system.event_loop import iterate_in_slices
from koalapy.system.tls import Trust

log = structlog.get_logger()

FIRST_PAUSE, MAX_PAUSE = 5.0, 3600.0
"""Seconds before the first retry, doubled for each further one, up to the maximum."""
MAX_WAITING = 20_000
"""Maximum number of undelivered notifications of all users together."""
MIN_PAUSE = 0.05
"""Minimum seconds between two passes over the queue."""
AT_ONCE = 8
"""Recipients that are notified at the same time."""
SLICE = 200
"""Jobs that are examined before other tasks run."""
LOOK_INTERVAL = 30.0
"""Seconds between two searches for jobs that wait for long."""


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
        self._at: dict[str, dict[int, None]] = {}
        """Ids by recipient: each recipient gets its notifications in order, however many retries one needs."""
        self._of_owner: Counter[str] = Counter()
        self._last_id = 0
        for each in store.notifications():
            self._add(each)
            self._last_id = each.id
        self._pace = Throttle(section.per_hour, 3600 / section.per_hour)
        self._paced: set[int] = set()
        """Notifications that the rate limit has let through once; their retries are not counted again."""
        self._telling: dict[str, asyncio.Task[None]] = {}
        """The running delivery of each recipient; one at a time."""
        self._told: set[int] = set()
        """Ids of finished notifications that must still be removed from the store."""
        self._wake = asyncio.Event()
        self._looked_at = clock()
        self._task: asyncio.Task[None] | None = None
        self._saving: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """Held while the store is changed, so that changes are made in order."""

    # Create notifications

    def of(self, job: Job, before: JobState | None, now: float) -> list[Notification]:
        """Return the notifications of a job's change. The caller stores them with the job, then calls ``send``."""
        return [each for event in happened(job, before) for each in self._of_job(event, job, now)]

    def _of_job(self, event: MailType, job: Job, now: float) -> list[Notification]:
        if not self._has_room(job.spec.owner):
            return []
        body = of_job(event, job, now)
        return [self._new(channel, to, job.spec.owner, body, now) for channel, to in places(job)]

    def _has_room(self, owner: str) -> bool:
        room = self._of_owner[owner] < self._section.waiting and len(self._waiting) < MAX_WAITING
        if not room:
            log.warning("too much waits to be told", action="notification-dropped", user=owner)
        return room

    def _new(self, channel: Channel, to: str, owner: str, body: dict[str, Any], now: float) -> Notification:
        self._last_id += 1
        return Notification(self._last_id, now, channel, to, owner, body)

    def send(self, notifications: Iterable[Notification]) -> None:
        """Queue notifications for delivery; the caller has stored them, or stores them afterwards."""
        for each in notifications:
            self._add(each)
        self._wake.set()

    def _add(self, each: Notification) -> None:
        self._waiting[each.id] = each
        self._at.setdefault(each.to, {})[each.id] = None
        self._of_owner[each.owner] += 1

    def alert_changed(self, alert: Alert, begins: bool) -> None:
        """Notify operators of an alert that begins or ends.

        It is sent before it is stored, since the alert may be about the store.
        """
        operators, now = self._section.operators, self._clock()
        if operators.severity is Severity.CRITICAL and alert.severity is not Severity.CRITICAL:
            return
        if not self._has_room(""):
            return
        body = of_alert(alert, now, begins=begins)
        found = [self._new("mail", to, "", body, now) for to in operators.mail]
        found += [self._new("webhook", to, "", body, now) for to in operators.webhooks]
        if found:
            self.send(found)
            self._keep(found)

    async def look(self) -> None:
        """Notify owners of the jobs that have become long-waiting since the last call."""
        before, self._looked_at = self._looked_at, self._clock()
        found: list[Notification] = []
        async for some in iterate_in_slices(self._jobs(), SLICE):
            for job in some:
                since = waits_since(job)
                if since is not None and before < since + self._section.waiting_after <= self._looked_at:
                    found += self._of_job(MailType.WAITING, job, self._looked_at)
        if found:
            self.send(found)
            self._keep(found)

    # Deliver notifications

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="notifications")

    async def stop(self) -> None:
        """Stop the delivery; the next daemon run delivers the rest from the store."""
        tasks = [task for task in (self._task, *self._telling.values(), *self._saving) if task is not None]
        for task in (self._task, *self._telling.values()):
            if task is not None:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            pause = self._begin_what_is_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            await asyncio.sleep(MIN_PAUSE)  # Collect further wake-ups: there may be many recipients.
            self._wake.clear()

    def _begin_what_is_due(self) -> float | None:
        """Start the deliveries that are due; return the seconds until the next one is due, None if there is none."""
        now, next_at = self._clock(), None
        for place, waiting in self._at.items():
            if place in self._telling:
                continue
            each = self._waiting[next(iter(waiting))]
            due = max(each.next_at, now + self._too_fast(each, now))
            if due > now:
                next_at = due if next_at is None else min(next_at, due)
            elif len(self._telling) < AT_ONCE:
                if each.id not in self._paced:
                    self._paced.add(each.id)
                    self._pace.count(each.owner, now)
                self._telling[place] = asyncio.create_task(self._tell(each))
        return None if next_at is None else max(0.0, next_at - now)

    def _too_fast(self, each: Notification, now: float) -> float:
        return 0.0 if each.id in self._paced else self._pace.wait_time(each.owner, now)

    async def _tell(self, each: Notification) -> None:
        told = {
            "channel": each.channel,
            "to": each.destination,
            "what": each.body.get("event"),
            "job": each.body.get("job"),
        }
        # The pause before a retry is set first, so that it applies however this try ends.
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(each.tries, 20))
        later = replace(each, tries=each.tries + 1, next_at=self._clock() + pause)
        self._waiting[each.id] = later
        try:
            if (why_not := self._why_not(each)) or (sender := self._senders.get(each.channel)) is None:
                raise NotTold(why_not or "this daemon does not send such any more", for_good=True)
            await self._told_by(sender, each)
        except NotTold as error:
            if error.for_good or self._clock() - each.at >= self._section.keep:
                log.warning("a notification is given up", action="notification-failed", reason=str(error), **told)
                self._done(each)
            else:
                log.info("a notification is tried again", action="notification-retried", reason=str(error), **told)
                self._keep([later])
        else:
            log.info("notification sent", action="notified", **told)
            self._done(each)
        finally:
            self._telling.pop(each.to, None)
            self._wake.set()

    def _why_not(self, each: Notification) -> str:
        """Return why the present configuration does not allow a notification; empty if it does."""
        reachable, operators = self._section.reachable, self._section.operators
        if not each.owner:
            return (
                ""
                if each.to in (*operators.mail, *operators.webhooks)
                else "operators no longer receive this notification"
            )
        return reachable.mail_problem(each.to) if each.channel == "mail" else reachable.webhook_problem(each.to)

    def _done(self, each: Notification) -> None:
        del self._waiting[each.id]
        del self._at[each.to][each.id]
        if not self._at[each.to]:
            del self._at[each.to]
        self._paced.discard(each.id)
        self._of_owner[each.owner] -= 1
        if not self._of_owner[each.owner]:
            del self._of_owner[each.owner]
        self._told.add(each.id)
        self._keep([])

    # Store notifications

    def _keep(self, changed: Iterable[Notification]) -> None:
        """Store changed notifications in the background.

        If that fails, they are still delivered, or delivered again after a restart.
        """
        saving = asyncio.create_task(self._save(list(changed)))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)

    async def _save(self, changed: list[Notification]) -> None:
        async with self._turn:
            try:
                # Notifications that were delivered in the meantime must not be stored again.
                if still := [each for each in changed if each.id in self._waiting]:
                    await query(self._store.save_notifications, still)
                if told := frozenset(self._told):
                    await query(self._store.remove_notifications, told)
                    self._told -= told
            except (StoreUnavailable, LeaseLost) as error:
                log.warning("what is on its way is not kept", action="notifications-not-kept", error=error.message)

    @staticmethod
    async def _told_by(sender: Sender, each: Notification) -> None:
        """Deliver a notification. Raise ``NotTold`` for unexpected errors as well, so that retries end."""
        try:
            await sender.tell(each)
        except NotTold:
            raise
        except Exception as error:
            log.error(
                "sending a notification failed by an internal error", action="notification-broken", exc_info=error
            )
            raise NotTold(f"internal error: {type(error).__name__}") from error


def build_notifications(
    section: NotificationSection,
    store: NotificationStore,
    clock: Callable[[], float],
    jobs: Callable[[], Sequence[Job]],
) -> Notifications:
    """Return the notifications with the configured channels.

    Raise ``UsageError`` if ``notifications.ca_file`` cannot be read.
    """
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
        secrets = {host: own.secret for host, own in section.webhooks.items()}
        senders["webhook"] = Webhooks(secrets, context)
    return Notifications(store, senders, section, clock, jobs)
