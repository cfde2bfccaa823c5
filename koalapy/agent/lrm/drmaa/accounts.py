"""A DRMAA library acts for who has loaded it: so each account that jobs run as has a worker process of its own."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from koalapy.agent.accounts.accounts import RunAs, Way, environment_of
from koalapy.agent.lrm.drmaa.codes import DrmaaEnding
from koalapy.agent.lrm.drmaa.control import DrmaaControl
from koalapy.agent.lrm.port import Finding, LrmSubmission
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.system.clock import SYSTEM_CLOCK, Clock

MAX_ACCOUNTS = 64
"""Accounts that have a worker at the same time; of more the one that was not asked for longest loses its own, and how
its jobs end is told by the resource manager itself."""
IDLE_TIMEOUT = 300.0
"""Seconds after which the worker of an account without jobs ends."""


def drmaa_control(library: str | None, run_as: RunAs) -> "DrmaaControl | DrmaaAccounts":
    """What hands jobs in; ``SiteRejected`` where that cannot be for several accounts."""
    if not run_as.accounts.are_many:
        return DrmaaControl(library)
    if run_as.way is Way.SUDO:
        raise SiteRejected(
            "a DRMAA library cannot be used for other accounts by rules of sudo",
            field="library",
            hint="leave the cluster's library out: commands are used then; see docs/clusters.md, Whose processes",
            fault=SiteFault.SITE,
        )
    return DrmaaAccounts(library, run_as)


class DrmaaAccounts:
    """Implements ``JobControl`` and what else ``DrmaaControl`` has, by one of those for each account."""

    def __init__(
        self,
        library: str | None,
        run_as: RunAs,
        *,
        max_accounts: int = MAX_ACCOUNTS,
        make_control: Callable[..., DrmaaControl] = DrmaaControl,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``make_control`` is called as ``DrmaaControl`` is."""
        self.library, self._run_as, self._max_accounts = library, run_as, max_accounts
        self._make_control, self._clock = make_control, clock
        self._own = make_control(library)
        self._controls: dict[str, DrmaaControl] = {}
        """Those least lately asked first."""
        self._asked: dict[str, float] = {}
        self._jobs: dict[str, set[str]] = {}
        """Of each account those that are not known to have ended."""
        self._listeners: list[Callable[[], None]] = []

    async def open(self) -> None:
        await self._own.open()

    async def close(self) -> None:
        for control in (self._own, *self._controls.values()):
            await control.close()

    async def submit(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        control = await self._of(submission.user)
        job = await control.submit(script, submission, native)
        self._jobs.setdefault(submission.user, set()).add(job)
        return job

    async def cancel(self, job: str, user: str = "") -> None:
        await (await self._of(user)).cancel(job)

    async def status(self, jobs: Sequence[str], user: str = "") -> Mapping[str, str]:
        return await (await self._of(user)).status(jobs)

    def on_ended(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)
        self._own.on_ended(listener)
        for control in self._controls.values():
            control.on_ended(listener)

    def ending(self, job: str) -> DrmaaEnding | None:
        found = (control.ending(job) for control in (self._own, *self._controls.values()))
        return next((ending for ending in found if ending is not None), None)

    async def version(self) -> str:
        return await self._own.version()

    async def submit_error(self) -> str:
        """As for the agent's own account."""
        await self._retire(self._max_accounts)
        return await self._own.submit_error()

    async def check(self, nodes: int = 1) -> Sequence[Finding]:
        return await self._own.check()

    async def _of(self, user: str) -> DrmaaControl:
        if not user:
            return self._own
        account = await self._run_as.accounts.find(user)  # each time: it may be gone, or closed
        control = self._controls.pop(user, None)
        if control is None:
            await self._retire(self._max_accounts - 1)

            def become(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
                return self._run_as.command(account, command), environment_of(account, environment)

            control = self._controls.get(user) or self._make_control(self.library, become=become)
            self._controls.pop(user, None)
            for listener in self._listeners:
                control.on_ended(listener)
        self._controls[user], self._asked[user] = control, self._clock.monotonic()
        return control

    async def _retire(self, most: int) -> None:
        """End workers that nobody needs, and those that are too many."""
        now = self._clock.monotonic()
        idle = [user for user in self._controls if not self._open_jobs(user) and now > self._asked[user] + IDLE_TIMEOUT]
        many = list(self._controls)[: max(0, len(self._controls) - most)]
        for user in {*idle, *many}:
            self._jobs.pop(user, None)
            await self._controls.pop(user).close()

    def _open_jobs(self, user: str) -> set[str]:
        jobs = self._jobs.get(user, set())
        jobs -= {job for job in jobs if self._controls[user].ending(job) is not None}
        return jobs
