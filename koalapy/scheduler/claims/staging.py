"""Apply the stage reports of clusters, from placement until the attempt is over (semantics 5 and 10).

Transfers start when a job is placed. The barrier keeps its program from starting before they end, which is estimated
as the job's start time (JST). A stage is named by the rank of its component, so a replacement on the same cluster
finds its files.
"""

from collections import OrderedDict, defaultdict

from koalapy.model.job import Component, Job, JobState, Token
from koalapy.model.reports import StageStatus
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_bytes
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.facts import TRANSFER_FAILURE
from koalapy.scheduler.attempts.failures import Failures
from koalapy.scheduler.claims.claim import Claiming
from koalapy.scheduler.effects import AttemptFailure, StageComponent, UnstageComponent
from koalapy.scheduler.events import InventoryReceived
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState

MAX_REMEMBERED_STRAYS = 1000
"""Maximum number of stray stages stored per cluster, since their end is not reported. The outbox bounds the open
commands."""


class Transfers:
    """The handler of stage reports. A report may arrive twice, late, or for an attempt that has ended."""

    def __init__(self, state: SchedulerState, attempts: Attempts, claiming: Claiming, failures: Failures) -> None:
        self._ledger = state.ledger
        self._attempts, self._claiming, self._failures = attempts, claiming, failures
        self._strays: defaultdict[ClusterName, OrderedDict[Token, None]] = defaultdict(OrderedDict)
        """The last reported stages of no live attempt, each of which was ended once."""

    def update(self, cluster: ClusterName, status: StageStatus, now: float) -> None:
        """Apply the report of a stage."""
        match = self._ledger.find_staged(status.token)
        if match is None or match[1].cluster != cluster:
            self._reject_stray(cluster, status)
            return
        job, component = match
        if not component.awaits_files or job.ending is not None:
            return
        if status.state == "failed":
            self._failed(job, component, status, now)
            return
        if (status.size, status.staged) != (component.stage_size, component.staged):
            job = self._ledger.update_component(job, component.index, stage_size=status.size, staged=status.staged)
        if status.state == "done":
            self._record_staged(job, live(job).components[component.index], now)
        else:
            self._claiming.estimate_start(job, now)

    def reconcile(self, event: InventoryReceived, now: float) -> None:
        """Compare a cluster's inventory with the live attempts, and order missing stages again."""
        reported = {status.token for status in event.inventory.stages}
        self._strays.pop(event.cluster, None)
        for status in event.inventory.stages:
            self.update(event.cluster, status, now)
        for job in self._ledger.active_jobs():
            if job.ending is not None or live(job).barrier_at is not None:
                continue
            for component in live(job).gang:
                if (
                    component.cluster == event.cluster
                    and component.staging
                    and job.stage_token(component) not in reported
                ):
                    job = self._ledger.update_component(
                        job, component.index, staging_since=now, staged=0, staged_at=None
                    )
                    self._ledger.send_command(StageComponent(component.cluster, job.stage_token(component)))

    def _record_staged(self, job: Job, component: Component, now: float) -> None:
        """Record that the input files of a component have arrived.

        After the last component's files, claim the remaining nodes and start the program if all nodes are there.
        """
        job = self._ledger.update_component(job, component.index, staged_at=now, staged=component.stage_size)
        if component.stage_size and component.staging_since is not None:
            took = max(now - component.staging_since, 1e-3)
            speed = f"{format_bytes(component.stage_size / took)}/s"
            self._ledger.record_event(
                job, now, "staged", f"{format_bytes(component.stage_size)} in {took:.3g} s ({speed})", component
            )
        if any(member.awaits_files for member in live(job).gang):
            return
        job = self._claiming.claim_after_transfers(job, now)
        self._attempts.open_barrier_if_complete(job, now)

    def _failed(self, job: Job, component: Component, status: StageStatus, now: float) -> None:
        """Retry the job of a failed transfer, or fail it if the files that it names do not exist.

        Only problems of the execution site count as its error.
        """
        if status.fault == "site":
            self._failures.handle_infrastructure_failure(job, component, AttemptFailure.FILES, status.error, now)
            return
        self._ledger.count_failed_attempt(component.cluster, AttemptFailure.FILES)
        self._ledger.record_event(job, now, "error", status.error, component)
        if status.fault == "job":
            self._attempts.end_attempt(job, JobState.FAILED, status.error, now)
            return
        self._failures.restart_job(job, f"{TRANSFER_FAILURE}: {status.error}", now)

    def _reject_stray(self, cluster: ClusterName, status: StageStatus) -> None:
        """Remove a stage of an attempt that has ended."""
        strays = self._strays[cluster]
        if status.token not in strays:
            self._ledger.send_command(UnstageComponent(cluster, status.token, stray=True))
        strays[status.token] = None
        strays.move_to_end(status.token)
        if len(strays) > MAX_REMEMBERED_STRAYS:
            strays.popitem(last=False)
