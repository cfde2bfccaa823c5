"""A browser with a session at a running daemon."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.needs import CHROMIUM_PATH

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 800}
DEADLINE = 60_000
"""Milliseconds to wait for an element."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium, without its sandbox, which root cannot use in a container."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM_PATH), args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """A user of a browser. Messages on the console count as errors of the page."""

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
        # Ended connections are no errors of a page.
        if kind in ("error", "warning") and "ERR_" not in text:
            self.complaints.append(text)

    def log_in(self, token: str, path: str = "/") -> None:
        """Log in by the page that requests a token."""
        self.page.goto(path)
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Log in").click()
        self.page.wait_for_url(lambda url: "/login" not in url)

    def open(self, path: str, *, live: bool = True) -> Page:
        """Open a page and wait until it is live."""
        self.page.goto(path)
        if live:
            self.page.wait_for_selector("#live[data-state=on]")
        return self.page

    def close(self) -> None:
        """Close the browser. Raise ``AssertionError`` if a page had errors."""
        self.context.close()
        assert not self.complaints, self.complaints
