"""Receivers of notifications: a mail server and a webhook in threads of this process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session


@dataclass
class WebhookRequest:
    """A request that a webhook received."""

    path: str
    signature: str
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.content)
        return body


@dataclass
class Webhook:
    """A webhook; ``answers`` are the status codes of its responses, of which the last one repeats."""

    port: int = 0
    posts: list[WebhookRequest] = field(default_factory=list)
    answers: list[int] = field(default_factory=lambda: [204])

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@contextmanager
def webhook(port: int = 0, hook: Webhook | None = None) -> Iterator[Webhook]:
    hook = hook or Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            hook.posts.append(WebhookRequest(self.path, self.headers["X-Koala-Signature"], content))
            code = hook.answers.pop(0) if len(hook.answers) > 1 else hook.answers[0]
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header("Location", hook.url("/elsewhere"))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    hook.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Mailbox:
    """The mails that a server accepted; ``answers`` are its responses to recipients, of which the last one repeats."""

    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    answers: list[str] = field(default_factory=lambda: ["250 OK"])
    quit_answer: str = "221 Bye"

    async def handle_QUIT(self, _: SMTP, __: Session, ___: Envelope) -> str:
        return self.quit_answer

    async def handle_RCPT(self, _: SMTP, __: Session, envelope: Envelope, address: str, ___: list[str]) -> str:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, _: SMTP, __: Session, envelope: Envelope) -> str:
        mail = message_from_bytes(envelope.content or b"", policy=policy.default)  # type: ignore[arg-type]
        assert isinstance(mail, EmailMessage)
        assert envelope.rcpt_tos == [mail["To"]]
        self.mails.append(mail)
        return "250 taken"

    def mails_to(self, recipient: str) -> list[EmailMessage]:
        return [mail for mail in self.mails if mail["To"] == recipient]


class FreePortController(Controller):
    """An SMTP server on a free port, which it reports as ``port``."""

    def _trigger_server(self) -> None:
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


@contextmanager
def mail_server() -> Iterator[Mailbox]:
    box = Mailbox()
    controller = FreePortController(box, hostname="127.0.0.1", port=0, ready_timeout=30)
    controller.start()
    box.port = controller.port
    try:
        yield box
    finally:
        controller.stop()
