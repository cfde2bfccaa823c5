"""Submit and cancel jobs through DRMAA libraries, each in a worker process of its own.

A library acts for the account that has loaded it, so each account that jobs run as has its own worker. A worker that
hangs or crashes is killed and started again.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from koalapy.agent.accounts import RunAs, SwitchMethod, account_environment
from koalapy.agent.core.settings import LRM_PREFIXES, LRM_VARIABLES, inherited_environment
from koalapy.agent.lrm.port import DrmaaEnding, Finding, JobControl, LrmSubmission
from koalapy.agent.lrm.rejections import classify_rejection
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.system.clock import SYSTEM_CLOCK, Clock

WORKER = Path(__file__).with_name("worker.py")
EXIT_TIMEOUT_S = 8.0
"""How long a worker may take to end; it ends itself within 5."""
_STATIC_TLS = "glibc.rtld.optional_static_tls=4096"
"""Libraries linked with jemalloc, such as Grid Engine's, need more of it than a running process has by default."""
_MAX_LINE_BYTES = 16 << 20
Become = Callable[[Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]]
"""Returns the command line and environment that run a command as another account."""
NO_SUCH_JOB = "InvalidJobException"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRANSIENT_ERRORS = _names(
    "AlreadyActiveSessionException DrmCommunicationException DrmsExitException DrmsInitException DrmaaException "
    "ExitTimeoutException InternalException NoActiveSessionException NoUsage OutOfMemoryException StopIteration "
    "TryLaterException"
)
"""Exceptions of the package and the worker after which a retry may succeed. Unknown codes raise ``DrmaaException``."""
PERMANENT_ERRORS = _names(
    "AuthorizationException ConflictingAttributeValuesException DefaultContactStringException DeniedByDrmException "
    "HoldInconsistentStateException IllegalStateException InvalidArgumentException InvalidAttributeFormatException "
    f"InvalidAttributeValueException InvalidContactStringException {NO_SUCH_JOB} InvalidJobTemplateException "
    "NoDefaultContactStringSelectedException ReleaseInconsistentStateException ResumeInconsistentStateException "
    "SuspendInconsistentStateException UnsupportedAttributeException"
)


@dataclass(frozen=True, slots=True)
class DrmaaTimeouts:
    """Timeouts of a DRMAA library, in seconds."""

    start_s: float = 30.0
    """For the start of a session."""
    request_s: float = 30.0
    """For the answer to a request; then the process is killed."""
    start_wait_s: float = 1.0
    """How long a snapshot waits for the start of a session; a later snapshot reports a later error."""
    first_restart_s: float = 1.0
    """Time until a process that ended is restarted. The resource manager may count its client for minutes, and accepts
    only a limited number of clients."""
    max_restart_s: float = 60.0
    """The limit of that time, which doubles with each end of the process."""
    rejected_s: float = 2.0
    """Time until a rejected session is requested again."""


DEFAULT_TIMEOUTS = DrmaaTimeouts()


class Unanswered(SiteUnavailable):
    """A request was sent to the DRMAA library, and may have had its effect although there is no answer."""


def convert_error(name: str, text: str) -> SiteError:
    """Return the site error for an exception of the DRMAA package."""
    line = " ".join(text.partition(": ")[2].split() if text.startswith("code ") else text.split())
    message = f"DRMAA: {line or name}"
    # Grid Engine reports a user's limit as temporary, like a busy master.
    if name in PERMANENT_ERRORS or classify_rejection(message) is SiteFault.LIMIT:
        return SiteRejected(message, value=name, fault=classify_rejection(message))
    return SiteUnavailable(message, value=name)


def start_error(name: str, text: str, library: str | None) -> SiteError:
    """Return why there is no session, by the last message of the worker."""
    line = " ".join(text.split())
    if name == "package":
        message, hint = f"the DRMAA package is missing: {line}", "pip install 'koalapy[drmaa]'"
        return SiteRejected(message, hint=hint, fault=SiteFault.SITE)
    if name == "library":
        return SiteRejected(
            f"the DRMAA library {library or 'libdrmaa'} cannot be loaded: {line}",
            hint="install it (Debian for Grid Engine: gridengine-drmaa1.0) and set the cluster's library to its path",
            fault=SiteFault.SITE,
        )
    return convert_error(name, text)


class DrmaaProcess:
    """A worker process, which is restarted after it ended. Its environment has no variables of the agent itself."""

    def __init__(
        self,
        library: str | None,
        contact: str,
        environment: Mapping[str, str],
        on_ended: Callable[[DrmaaEnding], None],
        timeouts: DrmaaTimeouts = DEFAULT_TIMEOUTS,
        become: Become | None = None,
    ) -> None:
        """``become`` runs the worker as another account."""
        self._become = become
        self._library, self._contact, self._on_ended, self._timeouts = library, contact, on_ended, timeouts
        self._environment = inherited_environment(LRM_VARIABLES, LRM_PREFIXES)
        tunables = os.environ.get("GLIBC_TUNABLES", "")
        if "optional_static_tls" not in tunables:
            tunables = ":".join(filter(None, (tunables, _STATIC_TLS)))
        self._environment["GLIBC_TUNABLES"] = tunables
        if library:
            self._environment["DRMAA_LIBRARY_PATH"] = library
        self._environment |= environment
        self._session: _Session | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._pause = 0.0
        self._not_before = 0.0
        self._reason = ""

    async def request(self, operation: str, **fields: object) -> Any:
        """Send a request and return the reply. Raise ``SiteError``; ``Unanswered`` if it may have had its effect."""
        session = await self._running_session()
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                answer = await session.request(operation, fields)
        except TimeoutError as error:
            session.kill()
            raise Unanswered(f"the DRMAA library did not answer within {self._timeouts.request_s:g} s") from error
        if "error" in answer:
            if answer["error"] not in TRANSIENT_ERRORS | PERMANENT_ERRORS:
                raise Unanswered(f"the DRMAA package failed: {answer['error']}: {answer['text']}")
            raise convert_error(answer["error"], answer["text"])
        return answer["reply"]

    async def read_about(self) -> Mapping[str, str]:
        """Return the library's system, implementation and version. Raise ``SiteError``."""
        return (await self._running_session()).about

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            if self._session is not None:
                await self._session.close()

    async def _running_session(self) -> "_Session":
        """Return the live session; start one if there is none and the pause after the last failure is over."""
        if self._session is not None and self._session.is_alive:
            return self._session
        async with self._starting:
            if self._closed:
                raise SiteUnavailable("DRMAA: closed")
            if self._session is not None and not self._session.is_alive:
                self._schedule_restart(self._session)
            if self._session is None:
                if (remaining := self._not_before - time.monotonic()) > 0:
                    raise SiteUnavailable(f"{self._reason}; it is restarted in {remaining:.0f} s")
                self._session = await self._start_session()
            return self._session

    def _schedule_restart(self, session: "_Session") -> None:
        """Set when a worker that ended may be restarted: after a pause that doubles unless it ran for long."""
        self._session = None
        first, longest = self._timeouts.first_restart_s, self._timeouts.max_restart_s
        lifetime = session.ended_at - session.started_at
        self._pause = first if lifetime > longest else min(longest, max(first, 2 * self._pause))
        self._not_before = session.ended_at + self._pause
        self._reason = session.end_reason

    async def _start_session(self) -> "_Session":
        """Start a worker process and wait for its hello; raise ``SiteError`` if it does not open a session."""
        # -P: neither the working directory nor the script's folder is searched, since this folder is named drmaa.
        command = [sys.executable, "-P", "-X", "utf8", str(WORKER), str(os.getpid()), self._contact]
        environment = self._environment
        if self._become is not None:
            command, environment = self._become(command, environment)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                cwd="/",
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as problem:
            raise SiteUnavailable(f"cannot run {sys.executable} now: {problem.strerror}") from problem
        session = _Session(process, self._on_ended)
        try:
            async with asyncio.timeout(self._timeouts.start_s):
                await session.greeted.wait()
        except TimeoutError:
            session.kill()
        except asyncio.CancelledError:
            session.kill()
            raise
        if session.about:
            return session
        await session.wait_for_end()
        if session.start_failure is not None:
            error = start_error(*session.start_failure, self._library)
            self._not_before, self._reason = time.monotonic() + self._timeouts.rejected_s, error.message
            if isinstance(error, SiteRejected):
                self._not_before = 0.0
            raise error
        self._schedule_restart(session)
        raise SiteUnavailable(self._reason)


class _Session:
    """One run of the worker process."""

    def __init__(self, process: asyncio.subprocess.Process, on_ended: Callable[[DrmaaEnding], None]) -> None:
        self._process, self._on_ended = process, on_ended
        self.started_at = time.monotonic()
        self.ended_at = self.started_at
        self.about: Mapping[str, str] = {}
        self.start_failure: tuple[str, str] | None = None
        """Kind and text of the error for which there is no session."""
        self.greeted = asyncio.Event()
        self._last_id = 0
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._errors: deque[str] = deque(maxlen=1)
        self._killed = False
        self._reader_task = asyncio.create_task(self._read_messages())

    @property
    def is_alive(self) -> bool:
        return not self._reader_task.done() and not self._killed

    @property
    def end_reason(self) -> str:
        """Describe how the worker process ended, with its last line of errors."""
        code = self._process.returncode
        if self._killed:
            end = "hung and was killed"
        elif code is not None and code < 0:
            end = f"was ended by {signal.Signals(-code).name}"
        else:
            end = f"ended with exit code {code}"
        return f"the DRMAA library's process {end}" + (f" ({self._errors[0]})" if self._errors else "")

    async def request(self, operation: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """Send an operation to the worker and wait for its reply."""
        self._last_id += 1
        number = self._last_id
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "op": operation, **fields}).encode() + b"\n")
            reply: dict[str, Any] = await future
            return reply
        finally:
            self._replies.pop(number, None)

    def kill(self) -> None:
        """Kill the worker, or close its input if it belongs to another account, which also ends it."""
        self._killed = True
        self.ended_at = time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.close()  # a process of another account may not be killed, and ends by this
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.kill()

    async def wait_for_end(self) -> None:
        """Wait until the worker has ended and its pending requests have failed."""
        await asyncio.wait([self._reader_task])

    async def close(self) -> None:
        """Ask the worker to close its session, and kill it after a timeout."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait([self._reader_task], timeout=EXIT_TIMEOUT_S)
        if not self._reader_task.done():
            self.kill()
        await self.wait_for_end()

    async def _read_messages(self) -> None:
        """Handle messages of the worker until it ends, then fail all pending requests."""
        assert self._process.stdout is not None
        errors = asyncio.create_task(self._read_errors())
        try:
            while line := await self._process.stdout.readline():
                self._handle_message(json.loads(line))
        except (ValueError, OSError):  # a line cut off
            self.kill()
        finally:
            await errors
            await self._process.wait()
            self.ended_at = time.monotonic()
            self.greeted.set()
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(Unanswered(self.end_reason))

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Handle a hello, a failed start, the end of a job, or a reply of the worker."""
        if "ended" in message:
            self._on_ended(DrmaaEnding(**message["ended"]))
        elif "hello" in message:
            self.about = message["hello"]
            self.greeted.set()
        elif "failed" in message:
            self.start_failure = (message["failed"], message["text"])
        elif (future := self._replies.get(message["id"])) and not future.done():
            future.set_result(message)

    async def _read_errors(self) -> None:
        """Keep the last line that the worker prints to standard error, for messages about its end."""
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):
            async for line in self._process.stderr:
                if text := line.decode(errors="replace").strip():
                    self._errors.append(text[:200])


RETRY_INTERVAL_S = 30.0
"""Time between two attempts to load a library that cannot be loaded."""
MAX_ACCOUNTS = 64
"""Accounts with a worker at the same time. The least recently used worker is closed, and the resource manager itself
reports how its jobs end."""
IDLE_TIMEOUT_S = 300.0
"""Time after which the worker of an account without jobs is closed."""
_MAX_RETAINED_ENDINGS = 10_000
_DEFAULT_LIBRARIES = ("/usr/lib/gridengine-drmaa/lib/libdrmaa.so.1.0", "/usr/lib/slurm-drmaa/lib/libdrmaa.so.1")


def drmaa_control(library: str | None, run_as: RunAs) -> "DrmaaControl":
    """Return a control for a library. Raise ``SiteRejected`` if it cannot be used for several accounts."""
    if run_as.accounts.is_mapped and run_as.switch_method is SwitchMethod.SUDO:
        raise SiteRejected(
            "jobs of other accounts that are submitted by sudo cannot use a DRMAA library",
            field="library",
            hint="remove the cluster's setting library, so that commands are used; see docs/clusters.md, Job accounts",
            fault=SiteFault.SITE,
        )
    return DrmaaControl(library, run_as)


class DrmaaControl(JobControl):
    """Submits and cancels jobs in DRMAA sessions: one of the agent's own account, and one of each account of jobs."""

    def __init__(
        self,
        library: str | None,
        run_as: RunAs | None = None,
        *,
        contact: str = "",
        environment: Mapping[str, str] = {},
        timeouts: DrmaaTimeouts = DEFAULT_TIMEOUTS,
        max_accounts: int = MAX_ACCOUNTS,
        make_process: Callable[..., DrmaaProcess] = DrmaaProcess,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``run_as`` is needed for jobs of other accounts; ``make_process`` has the parameters of ``DrmaaProcess``."""
        self.library = (
            library or os.environ.get("DRMAA_LIBRARY_PATH") or next(filter(os.path.exists, _DEFAULT_LIBRARIES), None)
        )
        self._run_as, self._max_accounts, self._clock = run_as, max_accounts, clock

        def make(user: str, become: Become | None = None) -> DrmaaProcess:
            record_ending = partial(self._record_ending, user)
            return make_process(self.library, contact, environment, record_ending, timeouts, become)

        self._make_process, self._own = make, make("")
        self._processes: dict[str, DrmaaProcess] = {}
        """Workers by account, the least recently used first."""
        self._used_at: dict[str, float] = {}
        self._active_jobs: defaultdict[str, set[str]] = defaultdict(set)
        """Jobs that are not known to have ended, by account."""
        self._start_wait_s = timeouts.start_wait_s
        self._listeners: list[Callable[[], None]] = []
        self._endings: dict[str, DrmaaEnding] = {}
        self._error = ""
        self._retry_at = 0.0
        self._starting: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        for process in (self._own, *self._processes.values()):
            await process.close()

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        job: str = await (await self._process_of(submission.user)).request(
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
        self._active_jobs[submission.user].add(job)
        return job

    async def cancel_job(self, job: str, user: str = "") -> None:
        try:
            await (await self._process_of(user)).request("cancel", job=job)
        except SiteRejected as error:
            if error.value != NO_SUCH_JOB:
                raise

    async def read_states(self, jobs: Sequence[str], user: str = "") -> Mapping[str, str]:
        """Return the DRMAA state of each job, or the name of the error of its query. Raise ``SiteError``."""
        states: dict[str, str] = await (await self._process_of(user)).request("status", jobs=list(jobs))
        return states

    def on_ended(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        return self._endings.get(job)

    async def submit_error(self) -> str:
        """Return why the agent's own account has no session, and close workers that are not needed.

        A slow library is reported by a later call.
        """
        await self._close_unused(self._max_accounts)
        if self._starting is None and time.monotonic() >= self._retry_at:
            self._starting = asyncio.create_task(self._start_session())
        if self._starting is not None:
            done, _ = await asyncio.wait((self._starting,), timeout=self._start_wait_s)
            self._starting = None if done else self._starting
        return self._error

    async def _start_session(self) -> None:
        """Start a session and record the error, if any; retry a rejected start after a pause."""
        try:
            await self._own.read_about()
            self._error = ""
        except SiteError as error:
            self._error = f"{error.message}; {error.hint}" if error.hint else error.message
            if isinstance(error, SiteRejected):
                self._retry_at = time.monotonic() + RETRY_INTERVAL_S

    async def read_version(self) -> str:
        """Return the resource manager and the DRMAA version, as the library reports them. Raise ``SiteError``."""
        about = await self._own.read_about()
        return f"{about['system']}, DRMAA {about['version']}"

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        try:
            about = await self._own.read_about()
        except SiteError as error:
            hint = error.hint or "see that the resource manager runs and that this host may submit jobs"
            return [Finding("DRMAA library", False, error.message, hint)]
        result = f"{about['implementation']}, DRMAA {about['version']}, {self.library or 'libdrmaa'}"
        return [Finding("DRMAA library", True, result)]

    def _record_ending(self, user: str, ending: DrmaaEnding) -> None:
        """Store the reported end of a job, and call the listeners. Forget the oldest end above the limit."""
        self._endings[ending.job] = ending
        self._active_jobs[user].discard(ending.job)
        if len(self._endings) > _MAX_RETAINED_ENDINGS:
            del self._endings[next(iter(self._endings))]
        for listener in self._listeners:
            listener()

    async def _process_of(self, user: str) -> DrmaaProcess:
        """Return the worker of an account, made on demand; close the least recently used one above the limit."""
        if not user:
            return self._own
        assert self._run_as is not None
        run_as = self._run_as
        account = await run_as.accounts.find_account(user)  # each time, since it may be gone or closed
        if user not in self._processes:
            await self._close_unused(self._max_accounts - 1)

        def become(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
            return run_as.build_command(account, command), account_environment(account, environment)

        process = self._processes.pop(user, None) or self._make_process(user, become)
        self._processes[user], self._used_at[user] = process, self._clock.monotonic()
        return process

    async def _close_unused(self, most: int) -> None:
        """Close the workers of accounts without jobs, and the least recently used ones beyond a number."""
        now = self._clock.monotonic()
        surplus = list(self._processes)[: max(0, len(self._processes) - most)]
        for user in list(self._processes):
            if user in surplus or (not self._active_jobs[user] and now > self._used_at[user] + IDLE_TIMEOUT_S):
                self._active_jobs.pop(user, None)
                await self._processes.pop(user).close()
