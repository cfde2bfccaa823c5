"""Submit and cancel jobs through a DRMAA library, in a worker process.

A worker that hangs or crashes is killed and started again. A library acts for the account that has loaded it, so jobs
that run as accounts of their owners are submitted by commands.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koalapy.agent.accounts import RunAs
from koalapy.agent.core.settings import LRM_PREFIXES, LRM_VARIABLES, inherited_environment
from koalapy.agent.lrm.port import DrmaaEnding, Finding, JobControl, LrmSubmission
from koalapy.agent.lrm.rejections import classify_rejection
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable

WORKER = Path(__file__).with_name("worker.py")
EXIT_TIMEOUT_S = 8.0
"""How long a worker may take to end; it ends itself within 5."""
_STATIC_TLS = "glibc.rtld.optional_static_tls=4096"
"""Libraries linked with jemalloc, such as Grid Engine's, need more of it than a running process has by default."""
_MAX_LINE_BYTES = 16 << 20
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


RETRY_INTERVAL_S = 30.0
"""Time between two attempts to load a library that cannot be loaded."""
_MAX_RETAINED_ENDINGS = 10_000
_DEFAULT_LIBRARIES = ("/usr/lib/gridengine-drmaa/lib/libdrmaa.so.1.0", "/usr/lib/slurm-drmaa/lib/libdrmaa.so.1")


def drmaa_control(library: str | None, run_as: RunAs) -> "DrmaaControl":
    """Return a control for a library. Raise ``SiteRejected`` if jobs run as accounts of their owners."""
    if run_as.accounts.is_mapped:
        raise SiteRejected(
            "a DRMAA library cannot submit jobs as accounts of their owners",
            field="library",
            hint="use the kind slurm or sge without the setting library; see docs/clusters.md, Job accounts",
            fault=SiteFault.SITE,
        )
    return DrmaaControl(library)


class DrmaaControl(JobControl):
    """Submits and cancels jobs in one DRMAA session, in a worker process that is restarted after it ended."""

    def __init__(
        self, library: str | None, *, environment: Mapping[str, str] = {}, timeouts: DrmaaTimeouts = DEFAULT_TIMEOUTS
    ) -> None:
        """``environment`` is added to that of the worker, which has no variables of the agent itself."""
        self.library = (
            library or os.environ.get("DRMAA_LIBRARY_PATH") or next(filter(os.path.exists, _DEFAULT_LIBRARIES), None)
        )
        self._timeouts = timeouts
        self._environment = inherited_environment(LRM_VARIABLES, LRM_PREFIXES)
        tunables = os.environ.get("GLIBC_TUNABLES", "")
        if "optional_static_tls" not in tunables:
            tunables = ":".join(filter(None, (tunables, _STATIC_TLS)))
        self._environment["GLIBC_TUNABLES"] = tunables
        if self.library:
            self._environment["DRMAA_LIBRARY_PATH"] = self.library
        self._environment |= environment
        self._session: _Session | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._pause = self._not_before = 0.0
        self._reason = ""
        self._listeners: list[Callable[[], None]] = []
        self._endings: dict[str, DrmaaEnding] = {}
        self._error = ""
        self._retry_at = 0.0
        self._starting: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self._closed = True
        async with self._opening:
            if self._session is not None:
                await self._session.close()

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        job: str = await self._request(
            "submit",
            script=str(script),
            name=submission.name,
            workdir=str(submission.workdir),
            output=str(submission.output),
            # Libraries split it at blanks outside of quotes.
            native=" ".join(
                f'"{option}"' if any(char.isspace() for char in option) or not option else option for option in native
            ),
        )
        return job

    async def cancel_job(self, job: str, user: str = "") -> None:
        try:
            await self._request("cancel", job=job)
        except SiteRejected as error:
            if error.value != NO_SUCH_JOB:
                raise

    async def read_states(self, jobs: Sequence[str]) -> Mapping[str, str]:
        """Return the DRMAA state of each job, or the name of the error of its query. Raise ``SiteError``."""
        states: dict[str, str] = await self._request("status", jobs=list(jobs))
        return states

    def on_ended(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        return self._endings.get(job)

    async def submit_error(self) -> str:
        """Return why there is no session. A slow library is reported by a later call."""
        if self._starting is None and time.monotonic() >= self._retry_at:
            self._starting = asyncio.create_task(self._start_session())
        if self._starting is not None:
            done, _ = await asyncio.wait((self._starting,), timeout=self._timeouts.start_wait_s)
            self._starting = None if done else self._starting
        return self._error

    async def _start_session(self) -> None:
        """Start a session and record the error, if any; retry a rejected start after a pause."""
        try:
            await self._read_about()
            self._error = ""
        except SiteError as error:
            self._error = f"{error.message}; {error.hint}" if error.hint else error.message
            if isinstance(error, SiteRejected):
                self._retry_at = time.monotonic() + RETRY_INTERVAL_S

    async def read_version(self) -> str:
        """Return the resource manager and the DRMAA version, as the library reports them. Raise ``SiteError``."""
        about = await self._read_about()
        return f"{about['system']}, DRMAA {about['version']}"

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        try:
            about = await self._read_about()
        except SiteError as error:
            hint = error.hint or "see that the resource manager runs and that this host may submit jobs"
            return [Finding("DRMAA library", False, error.message, hint)]
        result = f"{about['implementation']}, DRMAA {about['version']}, {self.library or 'libdrmaa'}"
        return [Finding("DRMAA library", True, result)]

    def _record_ending(self, ending: DrmaaEnding) -> None:
        """Store the reported end of a job, and call the listeners. Forget the oldest end above the limit."""
        self._endings[ending.job] = ending
        if len(self._endings) > _MAX_RETAINED_ENDINGS:
            del self._endings[next(iter(self._endings))]
        for listener in self._listeners:
            listener()

    async def _request(self, operation: str, **fields: object) -> Any:
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

    async def _read_about(self) -> Mapping[str, str]:
        """Return the library's system, implementation and version. Raise ``SiteError``."""
        return (await self._running_session()).about

    async def _running_session(self) -> "_Session":
        """Return the live session; start one if there is none and the pause after the last failure is over."""
        if self._session is not None and self._session.is_alive:
            return self._session
        async with self._opening:
            if self._closed:
                raise SiteUnavailable("DRMAA: closed")
            if self._session is not None and not self._session.is_alive:
                self._schedule_restart(self._session)
            if self._session is None:
                if (remaining := self._not_before - time.monotonic()) > 0:
                    raise SiteUnavailable(f"{self._reason}; it is restarted in {remaining:.0f} s")
                self._session = await self._open_session()
            return self._session

    def _schedule_restart(self, session: "_Session") -> None:
        """Set when a worker that ended may be restarted: after a pause that doubles unless it ran for long."""
        self._session = None
        first, longest = self._timeouts.first_restart_s, self._timeouts.max_restart_s
        lifetime = session.ended_at - session.started_at
        self._pause = first if lifetime > longest else min(longest, max(first, 2 * self._pause))
        self._not_before = session.ended_at + self._pause
        self._reason = session.end_reason

    async def _open_session(self) -> "_Session":
        """Start a worker process and wait for its hello; raise ``SiteError`` if it does not open a session."""
        # -P: neither the working directory nor the script's folder is searched, since this folder is named drmaa.
        command = [sys.executable, "-P", "-X", "utf8", str(WORKER), str(os.getpid())]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._environment,
                cwd="/",
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as problem:
            raise SiteUnavailable(f"cannot run {sys.executable} now: {problem.strerror}") from problem
        session = _Session(process, self._record_ending)
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
            error = start_error(*session.start_failure, self.library)
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
        self._killed = True
        self.ended_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
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
