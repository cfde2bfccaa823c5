"""Budgets of clusters: how much of the daemon the agent of each cluster may use, over all of its connections together.

An agent beyond its budget is read more slowly. So one site cannot keep the daemon from serving the others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from koalapy.model.alert import Alert, AlertKind, Severity
from koalapy.model.reports import Inventory
from koalapy.model.request import ClusterName
from koalapy.protocol.messages import Ask, FromAgent, Output, RelayState, StreamCredit, StreamData

MAX_PAUSE_S = 10.0
"""Less than the time after which an agent gives up a connection that does not answer its pings."""
MAX_DEBT_S = 60.0
"""Most seconds for which a cluster can be beyond its budget after it stops sending."""
QUESTION_WEIGHT = 20
"""Messages as which a question to another site counts, since that site must answer it, and the state of a relay, since
its certificate is checked."""
INVENTORY_WEIGHT = 200
"""Messages as which an inventory without entries counts: all jobs are compared with it. Open commands, which are sent
again, count in addition."""
NOTICED_PAUSE_S = 1.0
"""Pauses longer than this, and everything that is left out, are reported to operators."""
OVERRUN_END_S = 30.0
"""Seconds after which a cluster that has kept its budget is no longer reported."""


NO_CLUSTER: ClusterName = ""
"""The budget of connections without the token of a cluster."""


class Use(StrEnum):
    """A resource of the daemon, as a text for operators."""

    MESSAGES = "messages"
    BYTES = "bytes"
    PROCESSOR = "processor time"
    CONNECTIONS = "connections"
    LOG_LINES = "log lines"


ALLOWANCES: dict[Use, tuple[float, float]] = {
    Use.MESSAGES: (4000.0, 8000.0),
    Use.BYTES: (16 * 1024.0**2, 32 * 1024.0**2),
    Use.PROCESSOR: (0.2, 0.4),
    Use.CONNECTIONS: (0.5, 20.0),
    Use.LOG_LINES: (2.0, 100.0),
}
"""What a cluster may use each second, and at once. A site with 500 busy components uses a fifth."""


@dataclass(slots=True)
class Overrun:
    """A cluster beyond its budget: since when, when last, and of what."""

    use: Use
    since: float
    last: float


def count_messages(messages: Iterable[FromAgent]) -> int:
    """Return the number of messages, weighted by the work that they cause.

    Output and streams are measured by their bytes.
    """
    return sum(_weigh_message(message) for message in messages)


def _weigh_message(message: FromAgent) -> int:
    if isinstance(message, Inventory):
        return INVENTORY_WEIGHT + len(message.components) + len(message.stages)
    if isinstance(message, Ask | RelayState):
        return QUESTION_WEIGHT
    return 0 if isinstance(message, Output | StreamData | StreamCredit) else 1


class Budgets:
    """The budgets of all clusters."""

    def __init__(self, clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()) -> None:
        """``clock`` is monotonic."""
        self._clock = clock
        self._spent_until: dict[tuple[ClusterName, Use], float] = {}
        """Time of the event loop at which a cluster has its full allowance again."""
        self._overruns: dict[ClusterName, Overrun] = {}

    def spend(self, cluster: ClusterName, use: Use, amount: float) -> None:
        """Count a use of the daemon that has happened."""
        now, (rate, at_once) = self._clock(), ALLOWANCES[use]
        spent_until = max(now, self._spent_until.get((cluster, use), now)) + amount / rate
        self._spent_until[cluster, use] = min(spent_until, now + at_once / rate + MAX_DEBT_S)

    def try_to_spend(self, cluster: ClusterName, use: Use) -> bool:
        """Count one use if the budget of the cluster allows it, and return whether it does."""
        if self._debt(cluster, use, 1.0) > 0:
            if cluster != NO_CLUSTER:
                self._note_overrun(cluster, use)
            return False
        self.spend(cluster, use, 1.0)
        return True

    def may_log(self, cluster: ClusterName) -> bool:
        """Count a log line about a cluster's agent, and return whether the budget of the cluster allows it."""
        return self.try_to_spend(cluster, Use.LOG_LINES)

    async def await_allowance(self, cluster: ClusterName) -> None:
        """Wait until a cluster is within its budget, at most ``MAX_PAUSE_S``."""
        debt, use = max((self._debt(cluster, use), use) for use in (Use.MESSAGES, Use.BYTES, Use.PROCESSOR))
        if debt > 0:
            if debt > NOTICED_PAUSE_S:
                self._note_overrun(cluster, use)
            await asyncio.sleep(min(debt, MAX_PAUSE_S))

    def _debt(self, cluster: ClusterName, use: Use, amount: float = 0.0) -> float:
        """Return the seconds until a cluster may use ``amount``; 0 or less if it may now."""
        now, (rate, at_once) = self._clock(), ALLOWANCES[use]
        return max(now, self._spent_until.get((cluster, use), now)) + (amount - at_once) / rate - now

    def _note_overrun(self, cluster: ClusterName, use: Use) -> None:
        now, overrun = self._clock(), self._overruns.get(cluster)
        if overrun is None or now - overrun.last > OVERRUN_END_S:
            self._overruns[cluster] = Overrun(use, now, now)
        else:
            overrun.use, overrun.last = use, now

    async def check_overruns(self, now: float) -> AsyncIterator[Alert]:
        """Yield an alert for each cluster that was beyond its budget just now. ``now``: the daemon's time."""
        clock_now = self._clock()
        for cluster, overrun in list(self._overruns.items()):
            if clock_now - overrun.last > OVERRUN_END_S:
                continue
            rate = ALLOWANCES[overrun.use][0]
            yield Alert(
                AlertKind.AGENT_FLOODS,
                Severity.WARNING,
                f"cluster {cluster}",
                f"the agent of {cluster} sends more than one site may: it is served slowly, other sites as before",
                f"it used more {overrun.use} than a site may ({rate:g} a second)",
                f"ask the site what its agent does; until then: koala clusters drain {cluster} --reason 'its agent'; "
                "if it was taken over, replace its token",
                now - (clock_now - overrun.since),
                cluster=cluster,
            )
