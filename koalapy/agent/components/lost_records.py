"""Track the components whose records an agent has lost, for the cluster's report and the alert."""

import structlog

from koalapy.model.reports import MAX_LOST_RECORDS
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

REPORTED_FOR = 3600.0
"""Seconds for which the loss of a record is reported."""


class LostRecords:
    """Tokens of components whose records are missing or damaged."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lost_at: dict[str, float] = {}

    def add(self, token: str, reason: str) -> None:
        """Record and log the loss of a component's record, once for each component."""
        if token not in self._lost_at:
            self._lost_at[token] = self._clock.monotonic()
            log.error("a component's record is lost", action="record-lost", token=token, reason=reason)

    def tokens(self) -> tuple[str, ...]:
        """Return the tokens of the records that were lost in the last hour, at most ``MAX_LOST_RECORDS``."""
        horizon = self._clock.monotonic() - REPORTED_FOR
        self._lost_at = {token: at for token, at in self._lost_at.items() if at > horizon}
        return tuple(self._lost_at)[-MAX_LOST_RECORDS:]
