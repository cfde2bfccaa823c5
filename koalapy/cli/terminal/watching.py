"""Tables that follow the daemon: looked at again by a thread, and shown again whenever they differ (``--watch``)."""

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Generic, NoReturn, TypeVar

from koalapy.cli.terminal.screen import Block, Line, Screen
from koalapy.cli.terminal.width import can_redraw
from koalapy.client.client import Client, events
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.wording import format_duration

T = TypeVar("T")
TICK_S = 1.0
"""Time after which a page is drawn again, for the times in it."""
MAX_PAUSE_S = 15.0
"""Maximum time between two looks."""
MAX_LOAD = 0.1
"""Maximum share of the time in which the daemon answers this command."""
SILENCE_S = 30.0
"""Time after which a stream of events is dead. The daemon sends something every ten seconds."""
STALE_AFTER_S = 20.0
"""Age of a page from which on the page says how old it is, without an error too."""


class Feed(Generic[T]):
    """The latest answer of the daemon to a question, with its age and the reason why there is no newer one.

    A thread asks again when the daemon announces a change, or every few seconds where it announces none. It waits for a
    daemon that is away, however long that takes.
    """

    def __init__(self, client: Client, look: Callable[[Client], T], wake: Callable[[], None]) -> None:
        """Ask once; raise its ``CliError``. ``wake`` is called after each further answer or error."""
        self._client, self._look, self._wake = client.another(), look, wake
        self._timeouts = client.timeouts
        self._asked = time.monotonic()
        self.latest = look(self._client)
        self.at = time.monotonic()
        self.trouble: CliError | None = None
        """Why there is nothing newer, as long as that lasts."""
        self.ended: CliError | None = None
        """Why nothing more is to come."""
        self.is_live = False
        """Whether the daemon announces changes."""
        self._now, self._over = threading.Event(), threading.Event()
        for thread in (self._follow, self._listen):
            threading.Thread(target=thread, daemon=True).start()

    @property
    def staleness(self) -> str:
        """Why the latest answer is older than it should be; empty if it is not."""
        age = time.monotonic() - self.at
        if self.trouble is None and age <= STALE_AFTER_S:
            return ""
        why = self.trouble.message if self.trouble is not None else "the daemon takes long to answer"
        return printable(f"as it was {format_duration(age)} ago: {why}")

    def refresh(self) -> None:
        """Ask again as soon as the load of the daemon permits."""
        self._now.set()

    def close(self) -> None:
        self._over.set()
        self._now.set()

    def _follow(self) -> None:
        while not self._over.wait(self._pause()):
            self._now.wait(MAX_PAUSE_S if self.is_live and self.trouble is None else 0)
            self._now.clear()
            if self._over.is_set():
                return
            self._asked = time.monotonic()
            try:
                self.latest, self.trouble = self._look(self._client), None
                self.at = time.monotonic()
            except CliError as error:
                self.trouble = error
                if not error.is_passing:
                    self.ended = error
            except (KeyError, TypeError, ValueError) as error:
                message = f"the answer of the daemon at {self._client.url} is not understood ({error!r})"
                self.ended = CliError(message, Exit.FAILED, "use the koala command of the daemon's version")
            self._wake()
            if self.ended is not None:
                self.close()

    def _pause(self) -> float:
        """Return the minimum time until the next look."""
        if self.trouble is not None:
            return max(self._timeouts.min_look_pause_s, self.trouble.retry_after)
        took = max(0.0, self.at - self._asked)
        least = self._timeouts.min_live_look_pause_s if self.is_live else self._timeouts.min_look_pause_s
        return min(MAX_PAUSE_S, max(least, took / MAX_LOAD - took))

    def _listen(self) -> None:
        """Have ``_follow`` ask again when the daemon announces a change."""
        client, last = self._client.another(), ""
        while not self._over.is_set():
            try:
                for event in events(client.grid_events(last, SILENCE_S)):
                    self.is_live, last = True, event.get("id", last)
                    if event.get("event") == "changed" and json.loads(event["data"])["topics"]:
                        self._now.set()
            except CliError as error:
                if not error.is_passing:
                    break  # no such stream, or no access to it, of which the next look says more
            except (KeyError, TypeError, ValueError):
                break
            self.is_live = False
            self._now.set()
            self._over.wait(self._timeouts.min_look_pause_s)
        self.is_live = False
        self._now.set()


def watch(client: Client, look: Callable[[Client], T], page: Callable[[T], str]) -> NoReturn:
    """Show a page of what ``look`` returns until Ctrl-C: in place on a terminal, else each one that differs."""
    if not can_redraw(sys.stdout):
        each_change(client, look, lambda _, found: print(f"{_heading()}\n{page(found)}\n", flush=True))
    screen = Screen()
    feed = Feed(client, look, screen.wake)
    try:
        with screen.open():
            while feed.ended is None:
                stale = feed.staleness
                head = f"A{stale[1:]}; still watching." if stale else f"{_heading()}, live; Ctrl-C ends."
                screen.show([Line(head), *map(Line, page(feed.latest).splitlines())])
                screen.wait(TICK_S)
        raise feed.ended
    finally:
        feed.close()
        print(f"{_heading()}\n{page(feed.latest)}")


def each_change(client: Client, look: Callable[[Client], T], show: Callable[[T | None, T], None]) -> NoReturn:
    """Call ``show`` with the previous and the present answer whenever they differ, until Ctrl-C."""
    news = threading.Event()
    feed = Feed(client, look, news.set)
    before: T | None = None
    is_away = False
    while True:
        news.clear()
        found, trouble = feed.latest, feed.trouble
        if found != before:
            show(before, found)
            before = found
        if feed.ended is not None:
            raise feed.ended
        if (trouble is not None) != is_away:
            is_away = trouble is not None
            message = f"{printable(trouble.message)}; still watching" if trouble is not None else "the daemon is back"
            Block.report(f"koala: {message}")
        news.wait()


def _heading() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
