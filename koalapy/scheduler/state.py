"""What all parts of the scheduler work on."""

from collections.abc import Iterable

from koalapy.model.sharing import Sharing
from koalapy.model.users import Accounts
from koalapy.policies.registry import Registry
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.attempts.lrm_waits import LrmWaits
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.grid import GridStatus, Links
from koalapy.scheduler.ledger import Ledger
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.timers import Timers


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
