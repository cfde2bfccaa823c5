"""How things stand with the daemon, looked at again and again by a thread of its own, while somebody watches."""

import json
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit
from koalapy.cli.terminal.server_events import events

T = TypeVar("T")
MAX_PAUSE = 15.0
"""Seconds between two looks at a daemon that takes long to answer, and where nothing changes."""
SHARE = 0.1
"""Of the time, how much of it the daemon may be asked."""
SILENCE = 30.0
"""Seconds after which a stream of events is dead: something comes every ten."""


class Feed(Generic[T]):
    """What was found last, and how old that is; ``ended`` says why there is nothing more to come.

    It is looked for whenever the daemon says that something has changed, and by the clock where it does not say so. A
    daemon that goes away is waited for, however long that takes.
    """

    def __init__(self, client: Client, look: Callable[[Client], T], wake: Callable[[], None]) -> None:
        """Looks once before it returns, with whatever ``CliError`` there is; ``wake`` is called at each news."""
        self._client, self._look, self._wake = client.another(), look, wake
        self._timeouts = client.timeouts
        self._asked = time.monotonic()
        self.latest = look(self._client)
        self.at = time.monotonic()
        """When that was (monotonic seconds)."""
        self.trouble: CliError | None = None
        """Why there is nothing newer, as long as that lasts."""
        self.ended: CliError | None = None
        self.is_live = False
        """Whether the daemon tells of changes."""
        self._now, self._over = threading.Event(), threading.Event()
        for thread in (self._follow, self._listen):
            threading.Thread(target=thread, daemon=True).start()

    @property
    def age(self) -> float:
        """Seconds since the last look that found anything."""
        return time.monotonic() - self.at

    def refresh(self) -> None:
        """Look again now, or as soon as may be."""
        self._now.set()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._now.set()

    def _follow(self) -> None:
        while not self._over.wait(self._pause()):
            self._now.wait(MAX_PAUSE if self.is_live and self.trouble is None else 0)
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
                said = f"what the daemon at {self._client.url} says is not understood ({error!r})"
                self.ended = CliError(said, Exit.FAILED, "use the koala of its version")
            self._wake()
            if self.ended is not None:
                self.close()

    def _pause(self) -> float:
        """Seconds until the next look at the earliest."""
        if self.trouble is not None:
            return max(self._timeouts.min_look_pause_s, self.trouble.retry_after)
        took = max(0.0, self.at - self._asked)
        least = self._timeouts.min_live_look_pause_s if self.is_live else self._timeouts.min_look_pause_s
        return min(MAX_PAUSE, max(least, took / SHARE - took))

    def _listen(self) -> None:
        """Have it looked again whenever the daemon says that something has changed."""
        client, last = self._client.another(), ""
        while not self._over.is_set():
            try:
                for event in events(client.grid_events(last, SILENCE)):
                    self.is_live, last = True, event.get("id", last)
                    if event.get("event") == "changed" and json.loads(event["data"])["topics"]:
                        self._now.set()
            except CliError as error:
                if not error.is_passing:
                    break  # it has no such stream, or does not let us in, of which a look tells more
            except (KeyError, TypeError, ValueError):
                break
            self.is_live = False
            self._now.set()
            self._over.wait(self._timeouts.min_look_pause_s)
        self.is_live = False
        self._now.set()
