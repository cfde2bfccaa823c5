"""Notifications of users and operators by mail and webhooks, also after a restart of the daemon."""

import hashlib
import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until
from tests.receivers import Mailbox, Webhook, WebhookRequest, mail_server, webhook

pytestmark = [pytest.mark.processes, pytest.mark.grid]

SECRET = "what-the-receiver-knows-us-by"


class NotifiedGrid:
    """A grid with a mail server and a webhook that receive its notifications."""

    def __init__(self, grid: EmbeddedGrid, box: Mailbox, hook: Webhook) -> None:
        self.grid, self.box, self.hook = grid, box, hook

    def wait_for_requests(self, path: str, count: int) -> list[WebhookRequest]:
        """Wait for ``count`` requests at a path, and check their signatures."""
        wait_until(lambda: len(self._requests_of(path)) >= count, f"{count} posts at {path}: {self.hook.posts}")
        for post in self._requests_of(path):
            parameters = dict(part.split("=") for part in post.signature.split(","))
            signed = f"{parameters['t']}\n{self.hook.url(path)}\n".encode() + post.content
            assert parameters["v1"] == hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
        return self._requests_of(path)

    def _requests_of(self, path: str) -> list[WebhookRequest]:
        return [post for post in self.hook.posts if post.path == path]


@pytest.fixture(scope="module")
def notified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotifiedGrid]:
    directory = tmp_path_factory.mktemp("grid")
    with mail_server() as box, webhook() as hook:
        notifications = {
            "mail": {
                "server": f"127.0.0.1:{box.port}",
                "sender": "koala@example.org",
                "encryption": "none",
                "recipients": ["@example.org"],
            },
            "webhooks": {f"127.0.0.1:{hook.port}": {"secret": SECRET}},
            "operators": {"mail": ["ops@example.com"], "webhooks": [hook.url("/ops")], "severity": "critical"},
        }
        configuration = {
            "clusters": {"north": {"nodes": 2, "network": "127.0.95"}},
            "rules": {"unreachable_after": 1},
            "alerts": {"hold": 0, "release": 0},
            "notifications": notifications,
        }
        (directory / "koala.yaml").write_text(json.dumps(configuration))
        grid = EmbeddedGrid(directory / "data", KOALA_CONFIG=str(directory / "koala.yaml")).start()
        yield NotifiedGrid(grid, box, hook)
        grid.wait_until_idle()
        close_grid(grid)


def test_job_notifications_reach_the_owner(notified: NotifiedGrid) -> None:
    recipients = ["--mail-user", "ada@example.org", "--webhook", notified.hook.url("/ada")]
    options = [*recipients, "--mail-type", "begin", "--mail-type", "end", "--launcher", "processes", "-q"]
    result = notified.grid.run_koala(
        "submit", "--flexible", "2", "--name", "wave", *options, "--launcher", "processes", "-q", "true"
    )
    assert result.returncode == 0, result.stderr
    ident = int(result.stdout)
    assert notified.grid.wait_for_end(ident)["state"] == "succeeded"
    begun, ended = (post.body for post in notified.wait_for_requests("/ada", 2))
    assert (begun["event"], ended["event"]) == ("job-begin", "job-end")
    assert (ended["job"], ended["name"], ended["state"], ended["exit_code"]) == (ident, "wave", "succeeded", 0)
    assert ended["clusters"] == {"north": 2}
    wait_until(lambda: len(notified.box.mails_to("ada@example.org")) == 2, "two mails")
    subjects = [mail["Subject"] for mail in notified.box.mails_to("ada@example.org")]
    assert subjects == [f"[koala] job {ident} wave runs", f"[koala] job {ident} wave has succeeded"]
    text = notified.box.mails_to("ada@example.org")[1].get_content()
    assert "nodes: 2 on north" in text
    assert f"koala show {ident}" in text


@pytest.mark.evidence("U7")
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("mail_user", "eve@example.net", "may write to"),
        ("mail_user", "eve@sub.example.org", "may write to"),
        ("mail_user", "eve@example.net,ada@example.org", "no mail address"),
        ("mail_user", "eve%example.net@example.org", "no mail address"),
        ("webhook", "http://127.0.0.1:1/x", "host that this daemon may ask"),
        ("webhook", "https://metadata.example.org/", "host that this daemon may ask"),
        ("webhook", "http://hooks.example.org/", "not encrypted"),
        ("webhook", "file:///etc/passwd", "no URL"),
    ],
)
def test_notification_to_forbidden_recipient_is_rejected(
    notified: NotifiedGrid, field: str, value: str, reason: str
) -> None:
    body = {"request": {"type": "flexible", "total_size": 1}, "command": ["true"], field: value}
    answer = notified.grid.http.post("/api/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    assert reason in answer.json()["detail"]
    assert answer.json()["hint"]


def test_alert_notifications_reach_operators(notified: NotifiedGrid) -> None:
    agent = notified.grid.find_agent("north")
    psutil.Process(agent.pid).suspend()

    def about(event: str) -> list[dict[str, Any]]:
        """Return the bodies about this alert, without those of the alert that no agent had connected at the start."""
        bodies = [post.body for post in notified.wait_for_requests("/ops", 0)]
        return [body for body in bodies if body["event"] == event and "has not answered" in body["cause"]]

    (alert,) = wait_until(lambda: about("alert"), "the notification of operators")
    assert (alert["kind"], alert["severity"], alert["target"]) == ("agent-away", "critical", "cluster north")
    assert "pkill" in alert["remedy"]
    agent.kill()
    wait_until(
        lambda: notified.wait_for_requests("/ops", 1)[-1].body["event"] == "alert-over",
        "operators to be told that it is over",
    )
    mail = wait_until(
        lambda: [m for m in notified.box.mails_to("ops@example.com") if alert["cause"] in m.get_content()], "a mail"
    )[0]
    assert mail["Subject"] == "[koala] critical: cluster north, agent-away"
    assert alert["remedy"] in mail.get_content().replace("\n", " ")
    wait_until(
        lambda: notified.box.mails_to("ops@example.com")[-1]["Subject"].startswith("[koala] over: cluster north"),
        "a mail",
    )


def test_undelivered_notification_is_sent_after_restart(notified: NotifiedGrid) -> None:
    with webhook() as away:
        pass  # its port is closed from now on
    configuration = json.loads(Path(notified.grid.environment["KOALA_CONFIG"]).read_text())
    configuration["notifications"]["webhooks"][f"127.0.0.1:{away.port}"] = {"secret": SECRET}
    Path(notified.grid.environment["KOALA_CONFIG"]).write_text(json.dumps(configuration))
    notified.grid.stop_daemon()
    notified.grid.start()
    job = notified.grid.submit({"type": "flexible", "total_size": 1}, "true", webhook=away.url())
    notified.grid.wait_for_end(job)
    notified.grid.kill_daemon()
    with webhook(away.port, away):
        notified.grid.start()
        wait_until(lambda: away.posts, "what the daemon before had left")
    assert [post.body["job"] for post in away.posts] == [job]
