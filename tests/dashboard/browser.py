"""A real browser that looks at a real daemon, as somebody who is logged in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.needs import CHROMIUM_PATH

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 800}
DEADLINE = 60_000
"""Milliseconds until which something must be seen."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's own; its sandbox wants more than a container gives to root."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM_PATH), args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """Somebody before a browser; what the page complains of on its console is an error of the page."""

    def __init__(self, browser: Browser, url: str, token: str, **options: Any) -> None:
        """``options`` are those of a browser context: ``viewport``, ``color_scheme``, ``java_script_enabled``."""
        self.context: BrowserContext = browser.new_context(
            base_url=url, **({"viewport": DESKTOP, "locale": "en-GB", "timezone_id": "UTC"} | options)
        )
        self.context.set_default_timeout(DEADLINE)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        if token:
            self.log_in(token)

    def _note(self, kind: str, text: str) -> None:
        # That a connection ended is not a mistake of a page.
        if kind in ("error", "warning") and "ERR_" not in text and "htmx:sse:error" not in text:
            self.complaints.append(text)

    def log_in(self, token: str, path: str = "/") -> None:
        """By the page that asks for a token."""
        self.page.goto(path)
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Log in").click()
        self.page.wait_for_url(lambda url: "/login" not in url)

    def open(self, path: str, *, live: bool = True) -> Page:
        """A page, once it is live."""
        self.page.goto(path)
        if live:
            self.page.wait_for_selector("#live[data-state=on]")
        return self.page

    def close(self) -> None:
        """``AssertionError`` where a page complained."""
        self.context.close()
        assert not self.complaints, self.complaints
