"""The timeouts of commands, and a limit on the whole duration of a command."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """The durations of a command that tests vary, in seconds, and the function by which it pauses."""

    agent_greeting_s: float = 5.0
    """Limit for an agent of this host to name its cluster."""
    agent_login_s: float = 20.0
    """Limit for an agent of this host and its daemon to answer a request for a login."""
    certificate_renewal_s: float = 5.0
    """Time for which a daemon may show its previous certificate after the certificate file was replaced."""
    completion_s: float = 3.0
    """Limit for the completions of a shell."""
    daemon_start_s: float = 120.0
    """Limit for a daemon of this account to become ready; a start that fails ends the wait at once."""
    start_notice_s: float = 1.0
    """Time for a daemon that was started together with the command to register its start."""
    min_look_pause_s: float = 2.0
    """Minimum pause between two requests to a daemon that does not announce changes."""
    min_live_look_pause_s: float = 1.0
    """Minimum pause between two requests to a daemon that announces changes."""
    progress_delay_s: float = 1.0
    """Pause before the first line of progress on a terminal."""
    redraw_interval_s: float = 0.5
    """Pause between two lines of progress on a terminal."""
    plain_interval_s: float = 30.0
    """Pause before and between lines of progress without a terminal."""
    wait_report_delay_s: float = 1.0
    """Time that a command waits for a job before it prints what the job waits for."""
    last_report_s: float = 1.0
    """Limit for printing the last changes of a job after the job has ended."""
    sleep: Callable[[float], None] = time.sleep
    """Function that pauses a command for a number of seconds between two requests or attempts."""


DEFAULT_TIMEOUTS = ClientTimeouts()


class TimeIsUp(BaseException):
    """Raised when a deadline has passed."""


@contextmanager
def time_limit(deadline: float | None) -> Iterator[None]:
    """Run the block and raise ``TimeIsUp`` in it at ``deadline`` (monotonic seconds). For the main thread only."""
    if deadline is None:
        yield
        return

    def raise_time_is_up(_signum: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    old_handler = signal.signal(signal.SIGALRM, raise_time_is_up)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, deadline - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
