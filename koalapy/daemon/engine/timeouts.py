"""Durations of the daemon that its callers may vary."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DaemonTimeouts:
    """Durations in seconds, passed through the constructors of the daemon's parts. The defaults are the daemon's."""

    watchdog_interval_s: float = 0.5
    """Between two questions of the watchdog to the event loop."""
    loop_hangs_s: float = 3.0
    """After which an event loop that has not answered the watchdog counts as hanging."""
    max_oversleep_s: float = 1.0
    """The watchdog that wakes later than this was stopped with the whole process: that is not a hanging loop."""
    min_restart_delay_s: float = 0.5
    """Before an embedded agent is started again; doubled each time, up to ``max_restart_delay_s``."""
    max_restart_delay_s: float = 60.0
    agent_stable_s: float = 60.0
    """An embedded agent that lasted this long is started again after the shortest delay."""
    last_words_s: float = 1.0
    """In which the standard error of an ended agent is read to its end, as other processes may hold it open."""
    webhook_s: float = 15.0
    """For one call of a webhook."""
    mail_step_s: float = 10.0
    """For each answer of a mail server."""
    mail_s: float = 30.0
    """For one mail."""


DEFAULT_TIMEOUTS = DaemonTimeouts()
