"""A watchdog detects from a separate thread that the event loop hangs. Then a service manager restarts the daemon."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import structlog

from koalapy.daemon.engine.timeouts import DEFAULT_TIMEOUTS, DaemonTimeouts
from koalapy.system.process import ServiceManager

log = structlog.get_logger()

MAX_FRAMES = 8
"""Stack frames in the description of where the loop hangs."""


class Watchdog:
    """A watchdog, in a separate thread, of the event loop in which it is started.

    While the loop runs, it sends heartbeats to the service manager. When the loop hangs, it logs where and sends none.
    """

    def __init__(
        self, manager: ServiceManager, status: Callable[[], str] = str, timeouts: DaemonTimeouts = DEFAULT_TIMEOUTS
    ) -> None:
        """``status`` returns the state of the daemon in one line for operators; it is called in the loop."""
        self._manager, self._status, self._timeouts = manager, status, timeouts
        self._shown_status = ""
        self._answered_at = self._heartbeat_at = time.monotonic()
        self._awaits_answer = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._hangs = False

    def start(self) -> None:
        """Watch the running loop."""
        self._answered_at = time.monotonic()
        watched = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch_loop, args=watched, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch_loop(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        """Test in a thread whether the event loop answers. While it does, send heartbeats to the service manager."""
        interval = self._timeouts.watchdog_interval_s
        pause = min(interval, self._manager.interval or interval)
        while True:
            began = time.monotonic()
            if self._stop.wait(pause):
                return
            now = time.monotonic()
            if now - began > pause + self._timeouts.max_oversleep_s:
                self._answered_at = now
            if not self._awaits_answer:
                self._awaits_answer = True
                try:
                    loop.call_soon_threadsafe(self._note_answer)
                except RuntimeError:  # it is closed
                    return
            self._check_silence(now - self._answered_at, ident)
            if (
                not self._hangs
                and self._manager.interval is not None
                and now - self._heartbeat_at >= self._manager.interval
            ):
                self._heartbeat_at = now
                self._manager.send_heartbeat(self._shown_status)

    def _note_answer(self) -> None:
        """Record in the event loop that it runs, and show a changed status to the service manager."""
        self._answered_at, self._awaits_answer = time.monotonic(), False
        if (status := self._status()) != self._shown_status:
            self._shown_status = status
            self._manager.show_status(status)

    def _check_silence(self, silence: float, ident: int) -> None:
        """Log and report when the event loop hangs or runs again, by the seconds without an answer."""
        hangs, hung = silence > self._timeouts.loop_hangs_s, self._hangs
        self._hangs = hangs
        if hangs and not hung:
            seconds, stack = round(silence, 1), describe_stack(ident)
            log.critical("the daemon's event loop hangs", action="loop-hangs", seconds=seconds, where=stack)
            self._shown_status = ""
            self._manager.show_status(f"its loop hangs: {stack}")
        elif hung and not hangs:
            log.warning("the daemon's event loop runs again", action="loop-moves")


def describe_stack(ident: int) -> str:
    """Return where a thread is, as file:line function of its innermost calls first."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return "nowhere"
    stack = traceback.extract_stack(frame)[-MAX_FRAMES:]
    return " < ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in reversed(stack))
