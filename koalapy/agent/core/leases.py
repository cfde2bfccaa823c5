"""The leases of this agent's components: how long the daemon has been silent, and which leases expired.

Runners end their programs themselves. The agent ends what no runner can: jobs that wait in the resource manager, and
programs of stopped runners.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path

import structlog

from koalapy.agent.components.component import Component, Grace
from koalapy.agent.core.reporter import Reporter
from koalapy.protocol.messages import LeaseRenewed, RenewLease
from koalapy.runner.folders import replace_file
from koalapy.runner.lease import SilenceClock, renewal_interval
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.process import read_boot_id

log = structlog.get_logger()

LEASE_FILE = "lease.json"
"""File in the folder of a daemon instance with the time of its last answer."""
MAX_LEASE_FILE = 1000
"""Bytes."""
RENEWAL_TIMEOUT = 5.0
"""Seconds that the daemon has to renew the leases that expired while this process was stopped."""
MAX_LAG = 1.0
"""Seconds by which a check may be late before this process counts as having been stopped."""
ASK_AGAIN_INTERVAL = 0.2
"""Minimum seconds between two renewal requests."""


class Leases:
    """Ends components with leases that have expired.

    A lease is the number of seconds without an answer of the daemon after which a component must end. This time, the
    daemon's silence, is measured for each daemon.
    """

    def __init__(
        self, directory: Path, reporter: Reporter, end: Callable[[Component], None], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Set up. ``end`` ends a component that has failed."""
        self._directory, self._reporter, self._end, self._clock = directory, reporter, end, clock.since_boot
        self._began = clock.since_boot()
        self._boot_id = read_boot_id()
        self._clocks: dict[str, SilenceClock] = {}
        """Silence clocks by daemon instance: no daemon renews another's leases."""
        self._may_ask = False
        self._asked_at = -inf
        self._look_due = self._spared_until = -inf

    def on_welcome(self) -> None:
        self._may_ask = True
        self.request_renewal()

    def on_disconnect(self) -> None:
        self._may_ask = False

    def request_renewal(self) -> None:
        """Ask the daemon to confirm that it is alive."""
        if self._may_ask:
            self._asked_at = self._clock()
            number = self._clock_of(self._reporter.instance).start_query()
            self._reporter.uplink.send_soon(RenewLease(number=number), urgent=True)

    def on_renewed(self, message: LeaseRenewed) -> None:
        """Record that the daemon has answered, so that leases begin anew, and save the time."""
        instance = self._reporter.instance
        clock = self._clock_of(instance)
        last_answer_at = clock.contact_at
        clock.record_answer(message.number)
        if clock.contact_at > last_answer_at:
            self._save_answer_time(instance, clock.contact_at)

    def silence_for(self, component: Component) -> float | None:
        """Return for a runner the seconds since the daemon's last answer; None if unknown.

        Ask a daemon that has been silent for long at once: this process may have been stopped.
        """
        silence = self._clock_of(component.instance).silence
        is_late = silence > 2 * self._interval
        if (
            is_late
            and component.instance == self._reporter.instance
            and self._clock() - self._asked_at > ASK_AGAIN_INTERVAL
        ):
            self.request_renewal()
        return silence if isfinite(silence) else None

    async def watch_leases(self) -> None:
        """Request renewals and end components with expired leases, until cancelled."""
        while True:
            self._look_due = self._clock() + self._interval
            await asyncio.sleep(self._interval)
            self.request_renewal()
            self.end_expired()

    def end_expired(self) -> None:
        """End the components with expired leases.

        After this process was stopped, ask the daemon first; runners may have ended the programs already.
        """
        now = self._clock()
        if now > self._look_due + MAX_LAG and isfinite(self._look_due):
            self._spared_until = now + RENEWAL_TIMEOUT
        if now < self._spared_until:
            return
        for component in list(self._reporter.live.values()):
            lease = component.lease
            if lease is None or component.stop is not None or component.error:
                continue
            silence = self._clock_of(component.instance).silence
            if (silence if isfinite(silence) else now - self._began) < lease:
                continue
            log.warning("a lease has expired", action="lease-over", token=component.token, lease=lease)
            warning = (component.plan or {}).get("lease_warning")
            if warning is not None:
                component.grace = Grace.start_now(warning["signal"], warning["grace"])
            component.fail(reason := f"its lease is over: the daemon was silent for {lease:g} s")
            if not component.error:  # its program has succeeded, but runners of other nodes are connected
                component.stop = reason
            self._reporter.publish_status(component)
            self._end(component)

    @property
    def _interval(self) -> float:
        leases = [c.lease for c in self._reporter.live.values() if c.lease is not None]
        return renewal_interval(min(leases, default=None))

    def _clock_of(self, instance: str) -> SilenceClock:
        """Return the clock that measures a daemon's silence. Start it at the last answer to an earlier agent."""
        if instance not in self._clocks:
            self._clocks[instance] = SilenceClock(self._load_answer_time(instance), self._clock)
        return self._clocks[instance]

    def _load_answer_time(self, instance: str) -> float:
        """Return when a daemon answered an earlier agent; minus infinity if not since this boot of the machine."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            with open(self._directory / instance / LEASE_FILE, "rb") as file:
                noted = json.loads(file.read(MAX_LEASE_FILE))
            if noted["boot"] == self._boot_id:
                return min(float(noted["heard_at"]), self._began)
        return -inf

    def _save_answer_time(self, instance: str, heard_at: float) -> None:
        """Save the time of a daemon's answer for the next agent."""
        path = self._directory / instance / LEASE_FILE
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, json.dumps({"boot": self._boot_id, "heard_at": heard_at}).encode(), sync=False)
        except OSError as error:
            log.warning("cannot save a lease", action="lease-not-noted", instance=instance, reason=str(error))
