"""What all parts of the scheduler work on."""

from collections.abc import Iterable
from dataclasses import dataclass

from koalapy.model.job import ComponentState, Token
from koalapy.model.reports import ComponentStatus
from koalapy.model.sharing import Sharing
from koalapy.model.users import Accounts
from koalapy.policies.registry import Registry
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus, Links
from koalapy.scheduler.ledger import Ledger
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.timers import Timers


@dataclass(frozen=True, slots=True)
class LrmWait:
    """Of a component whose nodes have not all reported."""

    reason: str = ""
    up_by: float | None = None
    """When its nodes, which are its own and had to be started, were up, or will be at the latest; None where none had
    to be."""
    starting: bool = False
    """Whether that is still to come."""
    first_up_by: float = 0.0
    """When nodes that were started first would have been up at the latest: others in their place get no more time."""


NONE_KNOWN = LrmWait()


class LrmWaits:
    """Why each component waits, and until when that is nobody's fault."""

    def __init__(self) -> None:
        self._waits: dict[Token, LrmWait] = {}

    def update(self, status: ComponentStatus, now: float) -> None:
        """Take in what was reported last of one component."""
        if status.state not in (ComponentState.SUBMITTED, ComponentState.WAITING):
            self.forget(status.token)
            return
        before = self._waits.get(status.token, NONE_KNOWN)
        if not (status.starting or before.starting) and status.pending == before.reason:
            return
        up_by, first_up_by = before.up_by, before.first_up_by
        if status.starting and not before.starting:
            up_by = first_up_by = first_up_by or now + status.starting
        elif before.starting and not status.starting:
            up_by = min(now, before.up_by or now)
        after = LrmWait(status.pending, up_by, bool(status.starting), first_up_by)
        if after != before:
            self._waits[status.token] = after

    def forget(self, token: Token) -> None:
        """It waits for nothing any more."""
        self._waits.pop(token, None)

    def reason(self, token: Token) -> str:
        """Why it waits, in its resource manager's words; empty when that was not said."""
        return self._waits.get(token, NONE_KNOWN).reason

    def up_by(self, token: Token) -> float | None:
        """Since when its nodes have been up, or when they will be at the latest; None where none had to be started."""
        return self._waits.get(token, NONE_KNOWN).up_by


class SchedulerState:
    """The rules, what is known of clusters and jobs, what has been learned, and the deadlines; every part gets it."""

    def __init__(
        self,
        rules: Rules,
        policies: Registry,
        clusters: Iterable[ClusterStatus],
        links: Links | None = None,
        experience: Experience | None = None,
        accounts: Accounts | None = None,
        owner_use: OwnerUse | None = None,
    ) -> None:
        self.rules = rules
        self.policies = policies
        self.accounts = accounts or Accounts()
        self.grid = GridStatus(clusters, links)
        speeds = {cluster.name: cluster.speed for cluster in self.grid.clusters()}
        self.sharing = Sharing(rules.sharing, rules.speed_threshold, speeds)
        self.owner_use = owner_use or OwnerUse()
        self.ledger = Ledger(self.owner_use, self.grid.touch)
        self.timers = Timers()
        self.lrm_waits = LrmWaits()
        self.experience = experience or Experience(speeds)
        self.now = 0.0
        """The latest time that the scheduler was told."""
