"""Live tables (``--watch``): a thread requests the data again, and changed tables are redrawn."""

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Generic, NoReturn, TypeVar

from koalapy.cli.terminal.screen import Block, Line, Screen
from koalapy.cli.terminal.width import can_redraw
from koalapy.client.client import Client, read_events
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.wording import format_duration

T = TypeVar("T")
TICK_S = 1.0
"""Interval for redrawing a page, since it may contain the current time."""
MAX_PAUSE_S = 15.0
"""Maximum time between two requests."""
MAX_LOAD = 0.1
"""Maximum fraction of the time that the daemon spends on requests of this command."""
SILENCE_S = 30.0
"""Time without data after which a stream of events is dead. The daemon sends data every ten seconds."""
STALE_AFTER_S = 20.0
"""Age from which a page shows its age, even without an error."""


class Feed(Generic[T]):
    """The latest response of the daemon to a request, with its age and the reason why there is no newer one.

    A thread repeats the request when the daemon announces a change, or every few seconds if the daemon announces none.
    It waits for an unreachable daemon without limit.
    """

    def __init__(self, client: Client, look: Callable[[Client], T], wake: Callable[[], None]) -> None:
        """Send the first request and raise its ``CliError``. ``wake`` is called after each later response or error."""
        self._client, self._look, self._wake = client.clone_for_thread(), look, wake
        self._timeouts = client.timeouts
        self._requested_at = time.monotonic()
        self.latest = look(self._client)
        self.received_at = time.monotonic()
        self.trouble: CliError | None = None
        """The error of the last request; None if it succeeded."""
        self.ended: CliError | None = None
        """The error that ended the feed; None while it runs."""
        self.is_live = False
        """Whether the daemon announces changes."""
        self._now, self._over = threading.Event(), threading.Event()
        for thread in (self._repeat_request, self._listen_for_changes):
            threading.Thread(target=thread, daemon=True).start()

    @property
    def staleness(self) -> str:
        """Return why the latest response is outdated; empty if it is current."""
        age = time.monotonic() - self.received_at
        if self.trouble is None and age <= STALE_AFTER_S:
            return ""
        reason = self.trouble.message if self.trouble is not None else "the daemon takes long to answer"
        return printable(f"as it was {format_duration(age)} ago: {reason}")

    def refresh(self) -> None:
        """Repeat the request as soon as the load of the daemon permits."""
        self._now.set()

    def close(self) -> None:
        self._over.set()
        self._now.set()

    def _repeat_request(self) -> None:
        """Send the request after each announced change, or periodically, until the feed ends. Runs in a thread."""
        while not self._over.wait(self._min_pause()):
            self._now.wait(MAX_PAUSE_S if self.is_live and self.trouble is None else 0)
            self._now.clear()
            if self._over.is_set():
                return
            self._requested_at = time.monotonic()
            try:
                self.latest, self.trouble = self._look(self._client), None
                self.received_at = time.monotonic()
            except CliError as error:
                self.trouble = error
                if not error.may_recover:
                    self.ended = error
            except (KeyError, TypeError, ValueError) as error:
                message = f"the answer of the daemon at {self._client.url} is not understood ({error!r})"
                self.ended = CliError(message, Exit.FAILED, "use the koala command of the daemon's version")
            self._wake()
            if self.ended is not None:
                self.close()

    def _min_pause(self) -> float:
        """Return the minimum time until the next request in seconds."""
        if self.trouble is not None:
            return max(self._timeouts.min_look_pause_s, self.trouble.retry_after)
        took = max(0.0, self.received_at - self._requested_at)
        min_pause = self._timeouts.min_live_look_pause_s if self.is_live else self._timeouts.min_look_pause_s
        return min(MAX_PAUSE_S, max(min_pause, took / MAX_LOAD - took))

    def _listen_for_changes(self) -> None:
        """Wake ``_repeat_request`` when the daemon announces a change."""
        client, last = self._client.clone_for_thread(), ""
        while not self._over.is_set():
            try:
                for event in read_events(client.grid_events(last, SILENCE_S)):
                    self.is_live, last = True, event.get("id", last)
                    if event.get("event") == "changed" and json.loads(event["data"])["topics"]:
                        self._now.set()
            except CliError as error:
                if not error.may_recover:
                    break  # no stream, or no access to it: the next request reports the reason
            except (KeyError, TypeError, ValueError):
                break
            self.is_live = False
            self._now.set()
            self._over.wait(self._timeouts.min_look_pause_s)
        self.is_live = False
        self._now.set()


def watch_page(client: Client, look: Callable[[Client], T], page: Callable[[T], str]) -> NoReturn:
    """Show the result of ``look``, formatted by ``page``, until Ctrl-C. Without a terminal, print each changed page."""
    if not can_redraw(sys.stdout):
        show_changes(client, look, lambda _, answer: print(f"{_heading()}\n{page(answer)}\n", flush=True))
    screen = Screen()
    feed = Feed(client, look, screen.end_wait)
    try:
        with screen.open_screen():
            while feed.ended is None:
                stale = feed.staleness
                head = f"A{stale[1:]}; still watching." if stale else f"{_heading()}, live; Ctrl-C ends."
                screen.draw_page([Line(head), *map(Line, page(feed.latest).splitlines())])
                screen.wait_for_input(TICK_S)
        raise feed.ended
    finally:
        feed.close()
        print(f"{_heading()}\n{page(feed.latest)}")


def show_changes(client: Client, look: Callable[[Client], T], show: Callable[[T | None, T], None]) -> NoReturn:
    """Call ``show`` with the previous and the current response whenever they differ, until Ctrl-C."""
    news = threading.Event()
    feed = Feed(client, look, news.set)
    previous: T | None = None
    is_away = False
    while True:
        news.clear()
        latest, trouble = feed.latest, feed.trouble
        if latest != previous:
            show(previous, latest)
            previous = latest
        if feed.ended is not None:
            raise feed.ended
        if (trouble is not None) != is_away:
            is_away = trouble is not None
            message = f"{printable(trouble.message)}; still watching" if trouble is not None else "the daemon is back"
            Block.report(f"koala: {message}")
        news.wait()


def _heading() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
