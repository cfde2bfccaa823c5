"""Submit and cancel jobs through DRMAA libraries.

A library acts for the account that has loaded it, so each account that jobs run as has its own worker process.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from koalapy.agent.accounts import RunAs, SwitchMethod, account_environment
from koalapy.agent.lrm.drmaa.process import DEFAULT_TIMEOUTS, NO_SUCH_JOB, Become, DrmaaProcess, DrmaaTimeouts
from koalapy.agent.lrm.port import DrmaaEnding, Finding, JobControl, LrmSubmission
from koalapy.model.errors import SiteError, SiteFault, SiteRejected
from koalapy.system.clock import SYSTEM_CLOCK, Clock

RETRY_INTERVAL_S = 30.0
"""Time between two attempts to load a library that cannot be loaded."""
MAX_ACCOUNTS = 64
"""Accounts with a worker at the same time. The least recently used worker is closed, and the resource manager itself
reports how its jobs end."""
IDLE_TIMEOUT_S = 300.0
"""Time after which the worker of an account without jobs is closed."""
_MAX_RETAINED_ENDINGS = 1000
_DEFAULT_LIBRARIES = ("/usr/lib/gridengine-drmaa/lib/libdrmaa.so.1.0", "/usr/lib/slurm-drmaa/lib/libdrmaa.so.1")


def drmaa_control(library: str | None, run_as: RunAs) -> "DrmaaControl | DrmaaAccounts":
    """Return a control for a library. Raise ``SiteRejected`` if it cannot be used for several accounts."""
    if not run_as.accounts.is_mapped:
        return DrmaaControl(library)
    if run_as.switch_method is SwitchMethod.SUDO:
        raise SiteRejected(
            "jobs of other accounts that are submitted by sudo cannot use a DRMAA library",
            field="library",
            hint="remove the cluster's setting library, so that commands are used; see docs/clusters.md, Job accounts",
            fault=SiteFault.SITE,
        )
    return DrmaaAccounts(library, run_as)


class DrmaaControl(JobControl):
    """Submits and cancels jobs in the DRMAA session of one account."""

    def __init__(
        self,
        library: str | None,
        *,
        contact: str = "",
        environment: Mapping[str, str] = {},
        timeouts: DrmaaTimeouts = DEFAULT_TIMEOUTS,
        become: Become | None = None,
    ) -> None:
        self.library = (
            library or os.environ.get("DRMAA_LIBRARY_PATH") or next(filter(os.path.exists, _DEFAULT_LIBRARIES), None)
        )
        self._process = DrmaaProcess(self.library, contact, environment, self._record_ending, timeouts, become)
        self._start_wait_s = timeouts.start_wait_s
        self._listeners: list[Callable[[], None]] = []
        self._endings: dict[str, DrmaaEnding] = {}
        self._order: deque[str] = deque()
        self._error = ""
        self._retry_at = 0.0
        self._starting: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self._process.close()

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        job: str = await self._process.request(
            "submit",
            script=str(script),
            name=submission.name,
            workdir=str(submission.workdir),
            output=str(submission.output),
            # Libraries split it at blanks outside of quotes.
            native=" ".join(
                f'"{word}"' if any(char.isspace() for char in word) or not word else word for word in native
            ),
        )
        return job

    async def cancel_job(self, job: str, user: str = "") -> None:
        try:
            await self._process.request("cancel", job=job)
        except SiteRejected as error:
            if error.value != NO_SUCH_JOB:
                raise

    async def read_states(self, jobs: Sequence[str], user: str = "") -> Mapping[str, str]:
        """Return the DRMAA state of each job, or the name of the error of its query. Raise ``SiteError``."""
        states: dict[str, str] = await self._process.request("status", jobs=list(jobs))
        return states

    def on_ended(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        return self._endings.get(job)

    async def submit_error(self) -> str:
        """Return why no session can be started. A slow library is reported by a later call."""
        if self._starting is None and time.monotonic() >= self._retry_at:
            self._starting = asyncio.create_task(self._start_session())
        if self._starting is not None:
            done, _ = await asyncio.wait((self._starting,), timeout=self._start_wait_s)
            self._starting = None if done else self._starting
        return self._error

    async def _start_session(self) -> None:
        """Start a session and record the error, if any; retry a rejected start after a pause."""
        try:
            await self._process.read_about()
            self._error = ""
        except SiteError as error:
            self._error = f"{error.message}; {error.hint}" if error.hint else error.message
            if isinstance(error, SiteRejected):
                self._retry_at = time.monotonic() + RETRY_INTERVAL_S

    async def read_version(self) -> str:
        """Return the resource manager and the DRMAA version, as the library reports them. Raise ``SiteError``."""
        about = await self._process.read_about()
        return f"{about['system']}, DRMAA {about['version']}"

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        try:
            about = await self._process.read_about()
        except SiteError as error:
            hint = error.hint or "see that the resource manager runs and that this host may submit jobs"
            return [Finding("DRMAA library", False, error.message, hint)]
        result = f"{about['implementation']}, DRMAA {about['version']}, {self.library or 'libdrmaa'}"
        return [Finding("DRMAA library", True, result)]

    def _record_ending(self, ending: DrmaaEnding) -> None:
        """Store the reported end of a job, and call the listeners. Forget the oldest end above the limit."""
        self._endings[ending.job] = ending
        self._order.append(ending.job)
        if len(self._order) > _MAX_RETAINED_ENDINGS:
            self._endings.pop(self._order.popleft(), None)
        for listener in self._listeners:
            listener()


class DrmaaAccounts(JobControl):
    """Submits and cancels jobs as several accounts, with a ``DrmaaControl`` for each."""

    def __init__(
        self,
        library: str | None,
        run_as: RunAs,
        *,
        max_accounts: int = MAX_ACCOUNTS,
        make_control: Callable[..., DrmaaControl] = DrmaaControl,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``make_control`` has the parameters of ``DrmaaControl``."""
        self.library, self._run_as, self._max_accounts = library, run_as, max_accounts
        self._make_control, self._clock = make_control, clock
        self._own = make_control(library)
        self._controls: dict[str, DrmaaControl] = {}
        """Controls by account, the least recently used first."""
        self._used_at: dict[str, float] = {}
        self._active_jobs: dict[str, set[str]] = {}
        """Jobs that are not known to have ended, by account."""
        self._listeners: list[Callable[[], None]] = []

    async def close(self) -> None:
        for control in (self._own, *self._controls.values()):
            await control.close()

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        control = await self._control_of(submission.user)
        job = await control.submit_job(script, submission, native)
        self._active_jobs.setdefault(submission.user, set()).add(job)
        return job

    async def cancel_job(self, job: str, user: str = "") -> None:
        await (await self._control_of(user)).cancel_job(job)

    async def read_states(self, jobs: Sequence[str], user: str = "") -> Mapping[str, str]:
        return await (await self._control_of(user)).read_states(jobs)

    def on_ended(self, listener: Callable[[], None]) -> None:
        """Call a function whenever the end of a job of any account is reported."""
        self._listeners.append(listener)
        self._own.on_ended(listener)
        for control in self._controls.values():
            control.on_ended(listener)

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        endings = (control.reported_ending(job) for control in (self._own, *self._controls.values()))
        return next((ending for ending in endings if ending is not None), None)

    async def read_version(self) -> str:
        return await self._own.read_version()

    async def submit_error(self) -> str:
        """Return the error of the agent's own account, and close workers that are not needed."""
        await self._close_unused(self._max_accounts)
        return await self._own.submit_error()

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        return await self._own.check_setup()

    async def _control_of(self, user: str) -> DrmaaControl:
        """Return the control of an account, started on demand; close the least recently used one above the limit."""
        if not user:
            return self._own
        account = await self._run_as.accounts.find_account(user)  # each time, since it may be gone or closed
        control = self._controls.pop(user, None)
        if control is None:
            await self._close_unused(self._max_accounts - 1)

            def become(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
                return self._run_as.build_command(account, command), account_environment(account, environment)

            control = self._controls.get(user) or self._make_control(self.library, become=become)
            self._controls.pop(user, None)
            for listener in self._listeners:
                control.on_ended(listener)
        self._controls[user], self._used_at[user] = control, self._clock.monotonic()
        return control

    async def _close_unused(self, max_controls: int) -> None:
        """Close controls of accounts without jobs, and the least recently used ones beyond a number."""
        now = self._clock.monotonic()
        unused = set(list(self._controls)[: max(0, len(self._controls) - max_controls)])
        for user, control in self._controls.items():
            jobs = self._active_jobs.get(user, set())
            jobs -= {job for job in jobs if control.reported_ending(job) is not None}
            if not jobs and now > self._used_at[user] + IDLE_TIMEOUT_S:
                unused.add(user)
        for user in unused:
            self._active_jobs.pop(user, None)
            await self._controls.pop(user).close()
