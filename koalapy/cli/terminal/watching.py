"""``--watch``: a table that is shown again whenever something in it has changed."""

import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NoReturn, TypeVar

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit, printable
from koalapy.cli.terminal.feed import Feed
from koalapy.cli.terminal.screen import Screen
from koalapy.cli.terminal.width import can_redraw
from koalapy.model.wording import duration

T = TypeVar("T")
TICK = 1.0
"""Seconds after which times that go on are drawn anew."""
STALE_AFTER = 10.0
"""Seconds after which it is said how old a page is, whatever the reason."""


def watch(client: Client, look: Callable[[Client], T], page: Callable[[T], str]) -> NoReturn:
    """Show the page of what is found, until somebody interrupts, in place on a terminal; else each that differs.

    The page is made anew each second on a terminal, for the times in it that go on.
    """
    if not can_redraw(sys.stdout):
        each_change(client, look, lambda _, found: print(f"{_heading()}\n{page(found)}\n", flush=True))
    screen = Screen()
    feed = Feed(client, look, screen.wake)
    try:
        with screen.open():
            while feed.ended is None:
                screen.show(_head(feed), page(feed.latest).splitlines())
                screen.wait(TICK)
        raise feed.ended
    finally:
        feed.close()
        print(f"{_heading()}\n{page(feed.latest)}")


def each_change(client: Client, look: Callable[[Client], T], show: Callable[[T | None, T], None]) -> NoReturn:
    """Have what is found shown whenever it differs, beside what was before; until somebody interrupts."""
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
            told = f"{printable(trouble.message)}; still watching" if trouble is not None else "the daemon is back"
            print(f"koala: {told}", file=sys.stderr, flush=True)
        news.wait()


def refuse_with_watch(**others: bool) -> None:
    """``CliError`` for the first option that has no meaning where changes are shown."""
    for name, given in others.items():
        if given:
            raise CliError(f"--{name} and --watch cannot be given together", Exit.USAGE, "drop one")


def _heading() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _head(feed: Feed[T]) -> str:
    """How new the page is, and why it is no newer."""
    if feed.trouble is not None:
        return printable(f"As it was {duration(feed.age)} ago: {feed.trouble.message}; still watching.")
    if feed.age > STALE_AFTER:
        return f"As it was {duration(feed.age)} ago: the daemon takes long to answer."
    return f"{_heading()}, live; Ctrl-C ends."
