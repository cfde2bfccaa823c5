"""How things stand with the daemon, looked at again and again by a thread of its own, while somebody watches."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit

T = TypeVar("T")
MIN_PAUSE = 2.0
"""Seconds between two looks."""
MAX_PAUSE = 15.0
"""Seconds between two looks at a daemon that takes long to answer."""
SHARE = 0.1
"""Of the time, how much of it the daemon may be asked."""


class Feed(Generic[T]):
    """What was found last, and how old that is; ``ended`` says why there is nothing more to come.

    A daemon that goes away is waited for, however long that takes.
    """

    def __init__(self, client: Client, look: Callable[[Client], T], wake: Callable[[], None]) -> None:
        """Looks once before it returns, with whatever ``CliError`` there is; ``wake`` is called at each news."""
        self._client, self._look, self._wake = client.another(), look, wake
        self._asked = time.monotonic()
        self.latest = look(self._client)
        self.at = time.monotonic()
        """When that was (monotonic seconds)."""
        self.trouble: CliError | None = None
        """Why there is nothing newer, as long as that lasts."""
        self.ended: CliError | None = None
        self._now, self._is_over = threading.Event(), False
        threading.Thread(target=self._follow, daemon=True).start()

    @property
    def age(self) -> float:
        """Seconds since the last look that found anything."""
        return time.monotonic() - self.at

    def refresh(self) -> None:
        """Look again now."""
        self._now.set()

    def close(self) -> None:
        """Look no more."""
        self._is_over = True
        self._now.set()

    def _follow(self) -> None:
        pause = self._pause()
        while True:
            self._now.wait(pause)
            self._now.clear()
            if self._is_over:
                return
            self._asked = time.monotonic()
            try:
                self.latest, self.trouble = self._look(self._client), None
                self.at = time.monotonic()
                pause = self._pause()
            except CliError as error:
                pause = max(MIN_PAUSE, error.retry_after)
                self.trouble = error
                if not error.is_passing:
                    self.ended = error
            except (KeyError, TypeError, ValueError) as error:
                said = f"what the daemon at {self._client.url} says is not understood ({error!r})"
                self.ended = CliError(said, Exit.FAILED, "use the koala of its version")
            self._wake()
            if self.ended is not None:
                return

    def _pause(self) -> float:
        took = time.monotonic() - self._asked
        return min(MAX_PAUSE, max(MIN_PAUSE, took / SHARE - took))
