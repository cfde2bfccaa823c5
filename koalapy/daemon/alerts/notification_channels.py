"""Send notifications by mail, in separate threads, and by webhooks, without redirects; both with timeouts."""

import asyncio
import hashlib
import hmac
import json
import smtplib
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from email.message import EmailMessage
from email.utils import formatdate
from typing import Protocol
from urllib.parse import urlsplit

import httpx2

from koalapy import __version__
from koalapy.config.notifications import MailSection
from koalapy.daemon.alerts.notification_events import format_mail
from koalapy.daemon.engine.timeouts import DEFAULT_TIMEOUTS, DaemonTimeouts
from koalapy.model.notification import Notification, host_of
from koalapy.model.wording import to_line

MAX_HANGING = 8
"""Maximum number of threads that wait for a mail server, which may never finish its answers."""
MAX_ANSWER_LENGTH = 200
"""Maximum length in characters of a receiver's answer."""
SIGNATURE = "X-Koala-Signature"


class DeliveryFailed(Exception):
    """A notification was not delivered; ``for_good`` if a retry would fail as well."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.is_permanent = for_good


class Sender(Protocol):
    """A channel that delivers notifications."""

    async def deliver_notification(self, notification: Notification) -> str:
        """Deliver a notification and return the receiver's answer. Raise ``DeliveryFailed`` if that fails."""
        ...


class Webhooks:
    """A channel that posts JSON to a URL, signed with the secret of the URL's host."""

    def __init__(
        self, secrets: Mapping[str, str], context: ssl.SSLContext, timeouts: DaemonTimeouts = DEFAULT_TIMEOUTS
    ) -> None:
        self._secrets, self._context, self._timeout_s = secrets, context, timeouts.webhook_s

    async def deliver_notification(self, notification: Notification) -> str:
        url, host = httpx2.URL(notification.to), host_of(urlsplit(notification.to))
        secret = self._secrets.get(host)
        if secret is None or url.host != (urlsplit(notification.to).hostname or ""):
            raise DeliveryFailed("its host is not configured any more", for_good=True)
        content = json.dumps(notification.body, sort_keys=True).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"koalapy/{__version__}",
            SIGNATURE: sign_content(secret, notification.to, content, int(time.time())),
        }
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx2.AsyncClient(verify=self._context, trust_env=False, timeout=self._timeout_s) as client,
                client.stream("POST", url, content=content, headers=headers) as answer,
            ):
                status = answer.status_code  # the body is not read
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {self._timeout_s:g} s") from None
        except (httpx2.HTTPError, OSError) as error:
            raise DeliveryFailed(f"{type(error).__name__}: {error}"[:200]) from error
        if not 200 <= status < 300:
            raise DeliveryFailed(
                f"it answered HTTP status {status}", for_good=300 <= status < 500 and status not in (408, 425, 429)
            )
        return f"HTTP status {status}"


def sign_content(secret: str, url: str, content: bytes, signed_at: int) -> str:
    """Return the signature of a webhook's content, URL and time, so that the request cannot be replayed."""
    signed = f"{signed_at}\n{url}\n".encode() + content
    return f"t={signed_at},v1={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"


class Mail:
    """A channel that sends mail through a server, in threads that delay neither other tasks nor the daemon's end."""

    def __init__(
        self,
        section: MailSection,
        context: ssl.SSLContext,
        timeouts: DaemonTimeouts = DEFAULT_TIMEOUTS,
        max_hanging: int = MAX_HANGING,
    ) -> None:
        self._section, self._context, self._timeouts = section, context, timeouts
        self._max_hanging = max_hanging
        self._hanging = 0

    async def deliver_notification(self, notification: Notification) -> str:
        try:
            await self._send_in_thread(_build_message(notification, self._section.sender))
        except TimeoutError:
            raise DeliveryFailed(
                f"the mail server did not accept the mail within {self._timeouts.mail_s:g} s"
            ) from None
        except smtplib.SMTPRecipientsRefused as error:
            answers = list(error.recipients.values())
            raise DeliveryFailed(
                f"the mail server rejects the recipient: {', '.join(_describe_answer(*answer) for answer in answers)}",
                for_good=all(code >= 500 for code, _ in answers),
            ) from error
        except smtplib.SMTPDataError as error:
            raise DeliveryFailed(
                f"the mail server rejects the mail: {_describe_answer(error.smtp_code, error.smtp_error)}",
                for_good=error.smtp_code >= 500,
            ) from error
        except (smtplib.SMTPException, OSError, ValueError) as error:
            text = str(error)
            if isinstance(error, smtplib.SMTPResponseException):
                text = _describe_answer(error.smtp_code, error.smtp_error)
            raise DeliveryFailed(f"{type(error).__name__}: {text}"[:MAX_ANSWER_LENGTH]) from error
        return f"accepted by {self._section.server}"

    async def _send_in_thread(self, message: EmailMessage) -> None:
        """Send a mail in a new thread, so that a mail server that hangs does not block the daemon.

        Raise ``TimeoutError`` after ``mail_s`` seconds; the thread may run on. Raise ``DeliveryFailed`` if too many do.
        """
        if self._hanging >= self._max_hanging:
            raise DeliveryFailed("the mail server hangs")
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()

        def complete_sending(error: Exception | None) -> None:
            """Pass the result of the thread on, in the event loop. After a timeout, only count the thread as ended."""
            self._hanging -= 1
            if sent.done():
                return
            if error is None:
                sent.set_result(None)
            else:
                sent.set_exception(error)

        def send_message() -> None:
            """Send the mail in the thread, and report its end to the event loop."""
            error: Exception | None = None
            try:
                self._send_message(message)
            except Exception as caught:  # noqa: BLE001 whatever it is, the thread has ended
                error = caught
            with suppress(RuntimeError):  # the daemon has ended
                loop.call_soon_threadsafe(complete_sending, error)

        threading.Thread(target=send_message, name="mail", daemon=True).start()
        self._hanging += 1  # not before, since the machine may have no more threads
        async with asyncio.timeout(self._timeouts.mail_s):
            await sent

    def _send_message(self, message: EmailMessage) -> None:
        """Connect to the mail server, log in if a user is configured, and hand over the mail. Block until done."""
        section, timeout_s = self._section, self._timeouts.mail_step_s
        if section.encryption == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                section.host, section.port, timeout=timeout_s, context=self._context
            )
        else:
            server = smtplib.SMTP(section.host, section.port, timeout=timeout_s)
        with closing(server):
            try:
                if section.encryption == "starttls":
                    server.starttls(context=self._context)
                if section.user:
                    server.login(section.user, section.password)
                server.send_message(message)
            finally:
                with suppress(smtplib.SMTPException, OSError):  # no answer to QUIT changes what was accepted before
                    server.quit()


def _describe_answer(code: int, text: bytes | str) -> str:
    """Return an answer of a mail server in one line, such as ``SMTP 550 no such user``."""
    message = text.decode(errors="replace") if isinstance(text, bytes) else text
    return f"SMTP {code} {to_line(message)}".strip()[:MAX_ANSWER_LENGTH]


def _build_message(notification: Notification, sender: str) -> EmailMessage:
    """Return a notification as a mail. Each try has the same Message-ID, so that duplicates can be recognised."""
    subject, text = format_mail(notification.body)
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, sender, notification.to
    message["Date"] = formatdate(notification.at)
    message["Message-ID"] = f"<{notification.body['id']}.koala@{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"{text}\n")
    return message
