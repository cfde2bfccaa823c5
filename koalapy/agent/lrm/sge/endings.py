"""Finds out how jobs of ours have ended in Grid Engine, beside the listings: the accounting may take its time."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import structlog

from koalapy.agent.lrm.drmaa.accounts import DrmaaAccounts
from koalapy.agent.lrm.drmaa.control import DrmaaControl
from koalapy.agent.lrm.port import JobControl, JobEnd
from koalapy.agent.lrm.sge.commands import SgeCommands
from koalapy.agent.lrm.sge.jobs import TrackedJob, TrackedJobs
from koalapy.agent.lrm.sge.states import AccountingRecord, end_of
from koalapy.model.errors import SiteError
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

ACCOUNTING_DELAY = 5.0
"""Seconds in which it may still become known how a job ended: the accounting is written with a delay."""
ACCOUNTING_TIMEOUT = 60.0
"""Seconds for which an accounting that does not answer is waited for, with each job."""
ACCOUNTING_WAIT = 0.5
"""Seconds for which a listing waits for the accounting: one that answers at once has its word in the same listing."""
ACCOUNTING_INTERVAL = 1.0
MAX_CONCURRENT_QACCT = 4


class EndResolver:
    """Asks about each job that is no longer shown until it is known how it ended, or will never be; ``soon`` is called
    when there is news, or with the seconds after which there may be some."""

    def __init__(
        self,
        commands: SgeCommands,
        jobs: TrackedJobs,
        control: JobControl,
        soon: Callable[[float], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._commands, self._jobs, self._control, self._soon, self._clock = commands, jobs, control, soon, clock
        self._places = asyncio.Semaphore(MAX_CONCURRENT_QACCT)
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def resolve(self, ended: Iterable[TrackedJob]) -> None:
        """Settle what can be told of them now."""
        now = self._clock.monotonic()
        open = [known for known in ended if not self._resolved_at_once(known)]
        due = [known for known in open if known.id not in self._asking and now >= known.asked + ACCOUNTING_INTERVAL]
        asked = [self._ask(known, now) for known in due]
        if asked:
            await asyncio.wait(asked, timeout=ACCOUNTING_WAIT)
        for known in open:
            if known.id in self._jobs.known:
                self._give_up(known, self._clock.monotonic())

    async def close(self) -> None:
        """Ask no further."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _resolved_at_once(self, known: TrackedJob) -> bool:
        """Whether it could be settled without asking."""
        ending = self._control.ending(known.id) if isinstance(self._control, DrmaaControl | DrmaaAccounts) else None
        if ending is not None and ending.exit_code is not None and ending.signal_number is None and not known.cancelled:
            self._jobs.end(known, JobEnd(ending.exit_code))
        elif known.cancelled and not known.nodes:  # it never ran
            self._jobs.end(known, JobEnd(None, reason="cancelled"))
        else:
            # Of a killed job the library says "aborted" at best; the accounting knows why.
            return False
        return True

    def _ask(self, known: TrackedJob, now: float) -> asyncio.Task[None]:
        known.unanswered_since = now if known.unanswered_since is None else known.unanswered_since
        self._asking[known.id] = asyncio.create_task(self._inquire(known))
        return self._asking[known.id]

    async def _inquire(self, known: TrackedJob) -> None:
        try:
            async with self._places:
                records = await self._accounted(known) if known.id in self._jobs.known else []
        except SiteError as error:
            log.warning(
                "accounting does not answer", action="accounting-silent", lrm_job=known.id, reason=error.message
            )
            return
        finally:
            known.asked = self._clock.monotonic()
            self._asking.pop(known.id, None)
        known.unanswered_since = None
        if records and known.id in self._jobs.known:
            self._jobs.end(known, end_of(records[-1], cancelled=known.cancelled))
            self._soon(0.0)

    def _give_up(self, known: TrackedJob, now: float) -> None:
        """Settle it without the accounting's word if that has had its time."""
        asking = known.unanswered_since is not None
        began, timeout = (known.unanswered_since, ACCOUNTING_TIMEOUT) if asking else (known.gone, ACCOUNTING_DELAY)
        if began is not None and now - began < timeout:
            self._soon(ACCOUNTING_INTERVAL)
            return
        ending = self._control.ending(known.id) if isinstance(self._control, DrmaaControl | DrmaaAccounts) else None
        if known.cancelled:
            self._jobs.end(known, JobEnd(None, reason="cancelled"))
        elif ending is not None and (ending.aborted or ending.signal):
            self._jobs.end(known, JobEnd(None, lost=True, reason=f"Grid Engine ended it {ending.signal}".strip()))
        else:
            why = f": its accounting has not answered for {ACCOUNTING_TIMEOUT:g} s" if asking else ""
            self._jobs.end(known, JobEnd(None, reason=f"Grid Engine does not say how it ended{why}"))

    async def _accounted(self, known: TrackedJob) -> Sequence[AccountingRecord]:
        """What the accounting holds of it."""
        found = await self._commands.accounting(known.user or self._jobs.owner, known.id)
        own = [each for each in found if each.name == known.name]
        # What ran on further hosts has records of its own; the job's is that of the host where it was started.
        return [each for each in own if each.host == known.nodes[0]] if known.nodes else own
