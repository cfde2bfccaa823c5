"""Notifications: storage, retries, bounds, and independent delivery by recipient."""

import asyncio
import smtplib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from koalapy.config.notifications import MailSection, NotificationSection, OperatorsSection, WebhookSection
from koalapy.daemon.alerts.notification_channels import DeliveryFailed, Mail, Webhooks
from koalapy.daemon.alerts.notification_events import (
    build_alert_body,
    build_job_body,
    build_test_body,
    format_mail,
    requested_events,
)
from koalapy.daemon.alerts.notifications import FIRST_PAUSE, MAX_PAUSE, TEST_INTERVAL_S, Notifications
from koalapy.daemon.engine.timeouts import DaemonTimeouts
from koalapy.model.alert import Alert, AlertKind, Severity
from koalapy.model.errors import BusyError, ConflictError, StoreUnavailable
from koalapy.model.job import Attempt, Job, JobState
from koalapy.model.job_spec import JobSpec, MailType
from koalapy.model.notification import CHANNELS, AllowedRecipients, Notification
from koalapy.model.request import FlexibleRequest
from koalapy.system.tls import SYSTEM_TRUST
from tests import signals
from tests.memory_stores import memory_stores
from tests.receivers import mail_server, webhook

SECRET = "a-word-of-sixteen-or-more"
MAIL = MailSection("127.0.0.1:25", "koala@example.org", "none", recipients=["@example.org", "eve@example.com"])
SECTION = NotificationSection(MAIL, {"hooks.example.org": WebhookSection(SECRET)}, waiting_after=100.0, keep=5000.0)
SPEC = JobSpec(FlexibleRequest(1), ("true",), owner="ada", mail_user="ada@example.org")
ALERT = Alert(AlertKind.DATABASE, Severity.CRITICAL, "database", "it is away", "locked", "fuser koala.db", 1.0)


class Scene:
    """A clock, a store and a simulated sender."""

    def __init__(self, section: NotificationSection = SECTION) -> None:
        self.now = 1000.0
        self.section, self.store = section, memory_stores().notifications
        self.tried: list[str] = []
        self.jobs: list[Job] = []
        self.answer: Callable[[Notification], Any] = lambda _: None
        self.open_notifications()

    def open_notifications(self) -> Notifications:
        senders = {"mail": self, "webhook": self}
        self.notifications = Notifications(self.store, senders, self.section, lambda: self.now, lambda: self.jobs)  # type: ignore[arg-type]
        return self.notifications

    async def deliver_notification(self, notification: Notification) -> str:
        self.tried.append(f"{notification.body['event']} to {notification.to}")
        waits = self.answer(notification)
        if waits is not None:
            await waits
        return "taken"

    def change_job(self, job: Job, previous_state: JobState | None) -> None:
        """Store and send the notifications of a change, as the engine does."""
        notifications = self.notifications.make_notifications(job, previous_state, self.now)
        self.store.save_notifications(notifications)
        self.notifications.send_notifications(notifications)

    async def settle_deliveries(self) -> None:
        """Wait until all deliveries due at this time have ended."""

        def is_settled() -> bool:
            self.notifications._start_due_deliveries()
            return not (self.notifications._deliveries or self.notifications._saving)

        await signals.until(is_settled)


@pytest.fixture
async def scene() -> Scene:
    return Scene()


def make_job(ident: int, state: JobState, spec: JobSpec = SPEC, **fields: Any) -> Job:
    return Job(ident, spec, 900.0, state, **fields)


def failing_answer(error: Exception) -> Callable[[Notification], None]:
    def answer(_: Notification) -> None:
        raise error

    return answer


def test_requested_events_follow_mail_type_and_state() -> None:
    def events_of(types: str, state: JobState, previous_state: JobState | None, **fields: Any) -> list[MailType]:
        spec = replace(SPEC, mail_type=tuple(map(MailType, types.split())))
        return list(requested_events(make_job(1, state, spec, **fields), previous_state))

    begin, end, fail = MailType.BEGIN, MailType.END, MailType.FAIL
    assert events_of("begin end", JobState.RUNNING, JobState.STARTING) == [begin]
    assert events_of("begin end", JobState.RUNNING, JobState.RUNNING) == []
    assert events_of("begin end", JobState.RUNNING, JobState.UNKNOWN) == [], "it had begun before it was out of reach"
    assert events_of("begin end", JobState.SUCCEEDED, JobState.STARTING, started_at=1.0) == [begin, end]
    assert events_of("begin end", JobState.CANCELLED, JobState.QUEUED) == [end]
    assert events_of("fail", JobState.FAILED, JobState.RUNNING, started_at=1.0) == [fail]
    assert events_of("fail", JobState.SUCCEEDED, JobState.RUNNING, started_at=1.0) == []
    assert events_of("fail end", JobState.FAILED, JobState.RUNNING, started_at=1.0) == [end], "it is told once"
    assert events_of("", JobState.FAILED, JobState.RUNNING, started_at=1.0) == [end]
    assert events_of("begin waiting", JobState.QUEUED, JobState.RUNNING) == []
    assert list(requested_events(make_job(1, JobState.FAILED, replace(SPEC, mail_user="")), JobState.RUNNING)) == []


def test_begin_of_ended_job_has_no_final_fields() -> None:
    ended = make_job(1, JobState.FAILED, started_at=1.0, ended_at=2.0, exit_code=3, reason="the program exited with 3")
    begin, end = build_job_body(MailType.BEGIN, ended, 5.0), build_job_body(MailType.END, ended, 5.0)
    final_fields = ("state", "reason", "exit_code", "ended_at")
    assert [begin[name] for name in final_fields] == ["running", "", None, None]
    assert [end[name] for name in final_fields] == ["failed", "the program exited with 3", 3, 2.0]
    assert "exit" not in "".join(format_mail(begin))


@pytest.mark.parametrize("error", [DeliveryFailed("away"), LookupError("nobody thought of this")], ids=str)
async def test_delivery_failure_is_retried_and_given_up(scene: Scene, error: Exception) -> None:
    scene.answer = failing_answer(error)
    scene.change_job(make_job(1, JobState.SUCCEEDED), JobState.RUNNING)
    pauses: list[float] = []
    while scene.store.notifications():
        await scene.settle_deliveries()
        (waiting,) = scene.store.notifications() or [None]
        if waiting is None:
            break
        pauses.append(waiting.next_at - scene.now)
        scene.now = waiting.next_at
    assert pauses[:4] == [FIRST_PAUSE * factor for factor in (1, 2, 4, 8)]
    assert max(pauses) <= MAX_PAUSE
    assert 5000 <= scene.now - 1000 <= 5000 + MAX_PAUSE
    assert len(scene.tried) == len(pauses) + 1


async def test_notifications_undelivered_are_kept_for_next_daemon(scene: Scene) -> None:
    scene.change_job(make_job(1, JobState.SUCCEEDED), JobState.RUNNING)
    await scene.settle_deliveries()
    assert not scene.store.notifications()
    scene.answer = failing_answer(DeliveryFailed("away"))
    scene.change_job(make_job(2, JobState.FAILED), JobState.RUNNING)
    await scene.settle_deliveries()
    scene.answer = lambda _: None
    scene.open_notifications()
    await scene.settle_deliveries()
    assert len(scene.tried) == 2, "it is not tried before its time"
    scene.now += FIRST_PAUSE
    await scene.settle_deliveries()
    assert len(scene.tried) == 3
    assert not scene.store.notifications()


async def test_delivery_rejected_permanently_is_not_retried(scene: Scene) -> None:
    scene.answer = failing_answer(DeliveryFailed("no such mailbox", for_good=True))
    scene.change_job(make_job(1, JobState.SUCCEEDED), JobState.RUNNING)
    await scene.settle_deliveries()
    assert (len(scene.tried), scene.store.notifications()) == (1, [])


async def test_delivery_with_internal_error_sends_nothing_twice(scene: Scene) -> None:
    def broken(_: Notification) -> None:
        raise ZeroDivisionError

    scene.answer = broken
    scene.change_job(make_job(1, JobState.SUCCEEDED), JobState.RUNNING)
    telling = asyncio.gather(*scene.notifications._deliveries.values(), return_exceptions=True)
    scene.notifications._start_due_deliveries()
    await asyncio.gather(*scene.notifications._deliveries.values(), telling, return_exceptions=True)
    await scene.settle_deliveries()
    assert len(scene.tried) == 1


@pytest.mark.evidence("U8")
async def test_delivery_hanging_delays_own_recipient_only(scene: Scene) -> None:
    hangs = asyncio.Event()
    scene.answer = lambda notification: hangs.wait() if notification.to == "ada@example.org" else None
    bob = replace(SPEC, owner="bob", mail_user="bob@example.org")
    for ident, spec in enumerate((SPEC, SPEC, bob, bob), 1):
        scene.change_job(make_job(ident, JobState.SUCCEEDED, spec), JobState.RUNNING)
    scene.notifications.start()
    await signals.until(lambda: len(scene.tried) >= 3)
    assert sorted(scene.tried) == ["job-end to ada@example.org"] + 2 * ["job-end to bob@example.org"]
    await scene.notifications.stop()
    assert [each.owner for each in scene.store.notifications()] == ["ada", "ada"], "left to the next daemon"


@pytest.mark.evidence("U8")
async def test_hanging_webhooks_delay_neither_other_users_nor_operators() -> None:
    operators = OperatorsSection(["ops@example.org"], ["https://hooks.example.org/ops"])
    scene = Scene(replace(SECTION, operators=operators))
    hangs = asyncio.Event()
    scene.answer = lambda notification: hangs.wait() if "?" in notification.to else None
    for owner in ("ada", "bob", "carol"):
        for number in range(10):
            hook = f"https://hooks.example.org/{owner}?{number}"
            spec = replace(SPEC, owner=owner, mail_user="", webhook=hook)
            scene.change_job(make_job(number, JobState.SUCCEEDED, spec), JobState.RUNNING)
    dave = replace(SPEC, owner="dave", mail_user="dave@example.org")
    scene.change_job(make_job(99, JobState.SUCCEEDED, dave), JobState.RUNNING)
    scene.notifications.alert_changed(ALERT, True)
    scene.notifications._start_due_deliveries()
    await signals.until(lambda: len(scene.tried) >= 7)
    assert scene.tried == [
        *(f"job-end to https://hooks.example.org/{name}?{number}" for name in ("ada", "bob") for number in (0, 1)),
        "job-end to dave@example.org",
        "alert to ops@example.org",
        "alert to https://hooks.example.org/ops",
    ]
    hangs.set()
    await scene.settle_deliveries()
    assert len(scene.tried) == 33
    assert not scene.notifications._running


@pytest.mark.evidence("U8")
async def test_notifications_are_limited_by_queue_and_rate() -> None:
    scene = Scene(replace(SECTION, waiting=5, per_hour=3))
    for ident in range(1, 9):
        scene.change_job(make_job(ident, JobState.SUCCEEDED), JobState.RUNNING)
    scene.change_job(
        make_job(9, JobState.SUCCEEDED, replace(SPEC, owner="eve", mail_user="eve@example.com")), JobState.RUNNING
    )
    assert len(scene.store.notifications()) == 5 + 1
    for _ in range(10):
        await scene.settle_deliveries()
    assert sorted(scene.tried) == 3 * ["job-end to ada@example.org"] + ["job-end to eve@example.com"]
    scene.now += 1200.0
    await scene.settle_deliveries()
    assert len(scene.tried) == 5
    scene.now += 1200.0
    await scene.settle_deliveries()
    assert (len(scene.tried), scene.store.notifications()) == (6, [])


@pytest.mark.evidence("G10")
async def test_alerts_of_one_cluster_neither_delay_nor_drop_those_of_others() -> None:
    operators = OperatorsSection(["ops@example.org"])
    scene = Scene(replace(SECTION, waiting=5, per_hour=3, operators=operators))
    north = replace(ALERT, kind=AlertKind.DISK, cluster="north")
    for number in range(9):
        scene.notifications.alert_changed(replace(north, target=f"disk {number} of north"), begins=True)
    for cluster in ("south", ""):
        scene.notifications.alert_changed(replace(north, cluster=cluster, summary=f"of {cluster}"), begins=True)
    await scene.settle_deliveries()
    await scene.settle_deliveries()
    assert len(scene.tried) == 3 + 1 + 1
    assert [each.body["cluster"] for each in scene.store.notifications()] == ["north", "north"]


@pytest.mark.evidence("G10")
def test_mail_has_no_lines_or_headers_of_a_cluster() -> None:
    text = "full\r\nremedy: rm -rf /\nBcc: eve@example.org\u202e\x1b[2J"
    alert = replace(ALERT, target=text, summary=text, cause=text)
    subject, body = format_mail(build_alert_body(alert, 5.0, begins=True))
    assert subject.isprintable()
    assert [line.partition(":")[0] for line in body.splitlines() if line] == ["full  remedy", "cause", "remedy"]
    assert all(map(str.isprintable, body.splitlines()))


async def test_long_wait_is_notified_once(scene: Scene) -> None:
    waits = replace(SPEC, mail_type=(MailType.WAITING,))
    attempt = Attempt(1, (), 910.0, ended_at=960.0)
    scene.jobs = [
        make_job(1, JobState.QUEUED, waits),
        make_job(2, JobState.QUEUED, waits, attempt=attempt, generation=1),
    ]
    scene.jobs += [make_job(3, JobState.HELD, waits), make_job(4, JobState.QUEUED)]
    for now in (1000.5, 1030.0, 1059.0, 1061.0, 2000.0):
        scene.now = now
        await scene.notifications.notify_long_waits()
        await scene.settle_deliveries()
    assert scene.tried == ["job-waiting to ada@example.org"]
    scene.now = 1000.0
    again = scene.open_notifications()  # job 1 waited for 100 s before this start
    scene.now = 1001.0
    await again.notify_long_waits()
    await scene.settle_deliveries()
    assert len(scene.tried) == 1


@pytest.mark.evidence("U7")
def test_mail_address_that_names_another_host_is_rejected() -> None:
    """Mail servers may forward a mail to the host after the percent sign."""
    allowed = AllowedRecipients(("@example.org",))
    assert allowed.mail_problem("eve+list@example.org") == ""
    assert allowed.mail_problem("eve%example.net@example.org") == "no mail address as name@example.org"


@pytest.mark.evidence("U7")
async def test_notification_forbidden_by_configuration_is_dropped(scene: Scene) -> None:
    scene.change_job(make_job(1, JobState.SUCCEEDED), JobState.RUNNING)
    scene.section = replace(SECTION, mail=replace(MAIL, recipients=["@example.net"]))
    scene.open_notifications()
    await scene.settle_deliveries()
    assert (scene.tried, scene.store.notifications()) == ([], [])


async def test_operators_are_notified_without_database(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = "https://hooks.example.org/ops"
    operators = OperatorsSection(["ops@example.net"], [hook], Severity.CRITICAL)
    scene = Scene(replace(SECTION, operators=operators))

    def away(*_: object) -> None:
        raise StoreUnavailable("locked")

    monkeypatch.setattr(scene.store, "save_notifications", away)
    scene.notifications.alert_changed(replace(ALERT, severity=Severity.WARNING), True)
    scene.notifications.alert_changed(ALERT, True)
    scene.notifications.alert_changed(ALERT, False)
    for _ in range(3):
        await scene.settle_deliveries()
    assert sorted(scene.tried) == [
        f"{event} to {to}" for event in ("alert", "alert-over") for to in (hook, "ops@example.net")
    ]


def test_mail_headers_contain_no_line_breaks() -> None:
    body = build_job_body(
        MailType.END, make_job(1, JobState.FAILED, replace(SPEC, name="x\r\nBcc: eve@example.com")), 1.0
    )
    subject, _ = format_mail(body)
    assert subject == "[koala] job 1 x  Bcc: eve@example.com has failed"
    subject, text = format_mail(build_alert_body(replace(ALERT, target="a\nb"), 1.0, begins=True))
    assert subject == "[koala] critical: a b, database"
    assert "remedy: fuser koala.db" in text


@pytest.mark.evidence("U7")
@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("https://hooks.example.org/a?b=c", True),
        ("https://HOOKS.example.org:443/", True),
        ("https://hooks.example.org:8443/", False),
        ("https://hooks.example.org.evil.org/", False),
        ("https://hooks.example.org@evil.org/", False),
        ("https://evil.org\\@hooks.example.org/", False),
        ("https://evil.org#@hooks.example.org/", False),
        ("https://hooks.example.org:0443x/", False),
        ("http://hooks.example.org:443/", False),
        ("https://hooks.example.org /", False),
        ("https://hooks.example.org%00.evil.org/", False),
        ("//hooks.example.org/", False),
        ("https://[::1/", False),
        ("http://127.0.0.1:8642/api/v1/jobs", False),
        ("gopher://hooks.example.org/", False),
    ],
)
def test_webhook_to_unconfigured_host_is_rejected(url: str, reached: bool) -> None:
    assert (AllowedRecipients(hosts=frozenset({"hooks.example.org"})).webhook_problem(url) == "") == reached
    assert AllowedRecipients().webhook_problem(url)


@pytest.mark.evidence("U7")
@pytest.mark.parametrize("address", ["eve@example.com", "Any.One@EXAMPLE.org"])
def test_mail_to_unconfigured_recipient_is_rejected(address: str) -> None:
    reachable = SECTION.reachable
    assert not reachable.mail_problem(address)
    assert AllowedRecipients().mail_problem(address)
    for recipient in (
        f"{address},x@example.org",
        f"<{address}>",
        f"x {address}",
        f"{address}\n",
        "bob@example.com",
        "@example.org",
    ):
        assert reachable.mail_problem(recipient), recipient


# Senders


@pytest.mark.processes
async def test_webhook_status_decides_about_retry() -> None:
    context = SYSTEM_TRUST.create_context()
    with webhook() as hook:
        sender = Webhooks({f"127.0.0.1:{hook.port}": SECRET}, context)
        notification = Notification(1, 1.0, "webhook", hook.url(), "ada", {"event": "job-end"})
        for code, for_good in ((302, True), (404, True), (429, False), (500, False)):
            hook.answers = [code]
            with pytest.raises(DeliveryFailed) as refused:
                await sender.deliver_notification(notification)
            assert refused.value.is_permanent == for_good, code
        hook.answers = [200]
        assert await sender.deliver_notification(notification) == "HTTP status 200"
        assert {post.path for post in hook.posts} == {"/hook"}, "no redirection is followed"
        assert len({post.signature.partition(",v1=")[2] for post in hook.posts}) >= 1
    with pytest.raises(DeliveryFailed) as away:
        await sender.deliver_notification(notification)
    assert not away.value.is_permanent
    with pytest.raises(DeliveryFailed, match="not configured"):
        await Webhooks({}, context).deliver_notification(notification)


@pytest.mark.processes
async def test_webhook_without_answer_times_out() -> None:
    timeouts = DaemonTimeouts(webhook_s=0.2, mail_s=0.2, mail_step_s=60.0)
    writers: list[asyncio.StreamWriter] = []
    hangs = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    port = hangs.sockets[0].getsockname()[1]
    context = SYSTEM_TRUST.create_context()
    sender = Webhooks({f"127.0.0.1:{port}": SECRET}, context, timeouts)
    with pytest.raises(DeliveryFailed, match="no answer within"):
        await sender.deliver_notification(
            Notification(1, 1.0, "webhook", f"http://127.0.0.1:{port}/", "", {"event": "x"})
        )
    section = replace(MAIL, server=f"127.0.0.1:{port}")
    mail = Mail(section, context, timeouts, max_hanging=1)
    to = Notification(
        1, 1.0, "mail", "ada@example.org", "ada", build_job_body(MailType.END, make_job(1, JobState.FAILED), 1.0)
    )
    with pytest.raises(DeliveryFailed, match="did not accept the mail within"):
        await mail.deliver_notification(to)
    with pytest.raises(DeliveryFailed, match="hangs"):
        await mail.deliver_notification(to)
    await signals.until(lambda: len(writers) == 2)
    for writer in writers:
        writer.close()
    await signals.until(lambda: mail._hanging == 0)
    with pytest.raises(DeliveryFailed, match="SMTPServerDisconnected"):
        await Mail(section, context, DaemonTimeouts(mail_s=60.0, mail_step_s=0.1)).deliver_notification(to)
    hangs.close()


@pytest.mark.processes
async def test_mail_rejection_code_decides_about_retry() -> None:
    with mail_server() as box:
        mail = Mail(replace(MAIL, server=f"127.0.0.1:{box.port}"), SYSTEM_TRUST.create_context())
        body = build_job_body(MailType.END, make_job(1, JobState.FAILED, replace(SPEC, name="größe")), 1.0)
        to = Notification(1, 1.0, "mail", "ada@example.org", "ada", body)
        for answer, for_good in (("550 no such user", True), ("451 come again", False)):
            box.answers = [answer]
            with pytest.raises(DeliveryFailed) as refused:
                await mail.deliver_notification(to)
            assert refused.value.is_permanent == for_good
            assert answer in str(refused.value)
        box.answers = ["250 OK"]
        assert await mail.deliver_notification(to) == f"accepted by 127.0.0.1:{box.port}"
        (mailed,) = box.mails
        assert mailed["Subject"] == "[koala] job 1 größe has failed"
        assert mailed["Message-ID"] == f"<{body['id']}.koala@example.org>"
        tls = Mail(replace(MAIL, server=f"127.0.0.1:{box.port}", encryption="starttls"), SYSTEM_TRUST.create_context())
        with pytest.raises(DeliveryFailed):
            await tls.deliver_notification(to)
        assert len(box.mails) == 1, "nothing goes in clear where it is not to"


@pytest.mark.processes
async def test_mail_accepted_by_server_with_failing_quit_is_delivered() -> None:
    with mail_server() as box:
        mail = Mail(replace(MAIL, server=f"127.0.0.1:{box.port}"), SYSTEM_TRUST.create_context())
        to = Notification(1, 1.0, "mail", "ada@example.org", "ada", build_test_body("olga", 1.0))
        box.quit_answer = "421 closing"
        assert await mail.deliver_notification(to) == f"accepted by 127.0.0.1:{box.port}"
        box.answers = ["550 no such user"]
        with pytest.raises(DeliveryFailed, match="550 no such user") as refused:
            await mail.deliver_notification(to)
        assert refused.value.is_permanent, "the answer to QUIT does not hide that to the recipient"


async def test_mail_that_fails_before_or_in_its_thread_counts_no_hanging_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mail = Mail(MAIL, SYSTEM_TRUST.create_context(), max_hanging=1)
    to = Notification(1, 1.0, "mail", "ada@example.org", "ada", build_test_body("olga", 1.0))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    for owner, name in ((threading.Thread, "start"), (smtplib.SMTP, "__init__")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(RuntimeError, match="new thread"):
                await mail.deliver_notification(to)
        assert mail._hanging == 0


async def test_test_of_channel_uses_configured_recipients_only_once_in_30_s(scene: Scene) -> None:
    scene.section = replace(
        SECTION,
        operators=OperatorsSection(["ops@example.org", "eve@example.org"], ["https://hooks.example.org/SECRET"]),
    )
    notifications = scene.open_notifications()

    def refuse_eve(notification: Notification) -> None:
        if notification.to == "eve@example.org":
            raise DeliveryFailed("SMTP 550 <x-injected>")

    scene.answer = refuse_eve
    results = await notifications.send_test("mail", "olga")
    assert [result.to for result in results] == ["ops@example.org", "eve@example.org"]
    assert [result.delivered for result in results] == [True, False]
    assert results[1].answer == "SMTP 550 <x-injected>"
    with pytest.raises(BusyError) as busy:
        await notifications.send_test("mail", "olga")
    assert 0 < busy.value.retry_after <= TEST_INTERVAL_S
    (result,) = await notifications.send_test("webhook", "olga")
    assert (result.to, result.delivered) == ("hooks.example.org", True), "the path of a webhook may be secret"
    scene.now += TEST_INTERVAL_S
    assert len(await notifications.send_test("mail", "olga")) == 2
    assert list(scene.store.notifications()) == [], "a test is not repeated"
    scene.section = SECTION
    for channel in CHANNELS:
        with pytest.raises(ConflictError, match="is configured for operators"):
            await scene.open_notifications().send_test(channel, "olga")
    assert format_mail(build_test_body("olga", 1.0))[1].startswith("olga tests")
