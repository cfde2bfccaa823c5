"""The worker process that holds an agent's DRMAA session: started when needed, killed when it hangs, started anew."""

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

from koalapy.agent.core.settings import LRM_PREFIXES, LRM_VARIABLES, inherited_environment
from koalapy.agent.lrm.port import DrmaaEnding
from koalapy.agent.lrm.rejections import classify_rejection
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable

WORKER = Path(__file__).with_name("worker.py")
EXIT_TIMEOUT = 8.0
"""Seconds that a worker has to end by itself; it sees to it itself within 5."""
_STATIC_TLS = "glibc.rtld.optional_static_tls=4096"
"""Libraries linked with jemalloc, as Grid Engine's is, ask for more of it than a running process has by default."""
_MAX_LINE = 16 << 20


Become = Callable[[Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]]


NO_SUCH_JOB = "InvalidJobException"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRANSIENT_ERRORS = _names(
    "AlreadyActiveSessionException DrmCommunicationException DrmsExitException DrmsInitException DrmaaException "
    "ExitTimeoutException InternalException NoActiveSessionException NoUsage OutOfMemoryException StopIteration "
    "TryLaterException"
)
"""Exceptions of the package and of the worker after which the same request may succeed; ``DrmaaException`` itself
stands for a code that the package does not know."""
LASTING_ERRORS = _names(
    "AuthorizationException ConflictingAttributeValuesException DefaultContactStringException DeniedByDrmException "
    "HoldInconsistentStateException IllegalStateException InvalidArgumentException InvalidAttributeFormatException "
    f"InvalidAttributeValueException InvalidContactStringException {NO_SUCH_JOB} InvalidJobTemplateException "
    "NoDefaultContactStringSelectedException ReleaseInconsistentStateException ResumeInconsistentStateException "
    "SuspendInconsistentStateException UnsupportedAttributeException"
)


@dataclass(frozen=True, slots=True)
class DrmaaTimeouts:
    """All are seconds."""

    start_s: float = 30.0
    """How long a library may take to begin a session."""
    request_s: float = 30.0
    """How long a library may take to answer a request; then its process is killed."""
    start_wait_s: float = 1.0
    """How long a snapshot waits for the begin of a session; a later snapshot shows what the library says later."""
    first_restart_s: float = 1.0
    """How long a lost process is not started anew. Each loss may leave the resource manager with a client that it
    believes in for minutes, and it takes only so many."""
    max_restart_s: float = 60.0
    """The same after several losses, each of which doubles it up to this."""
    refused_s: float = 2.0
    """How long a session that was refused in words is not asked for again: that leaves nothing behind."""


DEFAULT_TIMEOUTS = DrmaaTimeouts()


class Unanswered(SiteUnavailable):
    """The request was sent, and it is not known whether it was done."""


def error_of(name: str, text: str) -> SiteError:
    """Return the site's error for one of the package's exceptions, in one line."""
    line = " ".join(text.partition(": ")[2].split() if text.startswith("code ") else text.split())
    message = f"DRMAA: {line or name}"
    # Grid Engine calls a user's limit something to be tried later, as it does a master that is busy.
    if name in LASTING_ERRORS or classify_rejection(message) is SiteFault.LIMIT:
        return SiteRejected(message, value=name, fault=classify_rejection(message))
    return SiteUnavailable(message, value=name)


def start_error(name: str, text: str, library: str | None) -> SiteError:
    """Return why there is no session, by what the worker process said as it ended."""
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
    return error_of(name, text)


class DrmaaProcess:
    """At most one worker, so at most one session. Its environment holds nothing of the agent's own."""

    def __init__(
        self,
        library: str | None,
        contact: str,
        environment: Mapping[str, str],
        ended: Callable[[DrmaaEnding], None],
        timeouts: DrmaaTimeouts = DEFAULT_TIMEOUTS,
        become: Become | None = None,
    ) -> None:
        """``become``: another account, by a command line and environment made of the worker's own."""
        self._become = become
        self._library, self._contact, self._ended, self._timeouts = library, contact, ended, timeouts
        self._environment = _environment(library, environment)
        self._session: _Session | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._pause = 0.0
        self._not_before = 0.0
        self._reason = ""

    async def request(self, operation: str, **fields: object) -> Any:
        """Raises ``SiteError``; ``Unanswered`` when it may have been done all the same."""
        session = await self._started()
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                answer = await session.request(operation, fields)
        except TimeoutError as error:
            session.kill()
            raise Unanswered(f"the DRMAA library did not answer within {self._timeouts.request_s:g} s") from error
        if "error" in answer:
            if answer["error"] not in TRANSIENT_ERRORS | LASTING_ERRORS:
                raise Unanswered(f"the DRMAA package failed: {answer['error']}: {answer['text']}")
            raise error_of(answer["error"], answer["text"])
        return answer["reply"]

    async def about(self) -> Mapping[str, str]:
        """What the library says of itself. Raises ``SiteError``."""
        return (await self._started()).about

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            if self._session is not None:
                await self._session.close()

    async def _started(self) -> "_Session":
        if self._session is not None and self._session.alive:
            return self._session
        async with self._starting:
            if self._closed:
                raise SiteUnavailable("DRMAA: closed")
            if self._session is not None and not self._session.alive:
                self._lost(self._session)
            if self._session is None:
                if (left := self._not_before - time.monotonic()) > 0:
                    raise SiteUnavailable(f"{self._reason}; it is started anew in {left:.0f} s")
                self._session = await self._start()
            return self._session

    def _lost(self, session: "_Session") -> None:
        self._session = None
        first, longest = self._timeouts.first_restart_s, self._timeouts.max_restart_s
        lived = session.ended_at - session.began
        self._pause = first if lived > longest else min(longest, max(first, 2 * self._pause))
        self._not_before = session.ended_at + self._pause
        self._reason = session.end_reason

    async def _start(self) -> "_Session":
        # Neither the working directory nor the script's own folder on the search path: modules named drmaa are there.
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
                limit=_MAX_LINE,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as problem:
            raise SiteUnavailable(f"cannot run {sys.executable} now: {problem.strerror}") from problem
        session = _Session(process, self._ended)
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
        await session.over()
        if session.refusal is not None:
            error = start_error(*session.refusal, self._library)
            self._not_before, self._reason = time.monotonic() + self._timeouts.refused_s, error.message
            if isinstance(error, SiteRejected):
                self._not_before = 0.0
            raise error
        self._lost(session)
        raise SiteUnavailable(self._reason)


class _Session:
    """One worker from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, ended: Callable[[DrmaaEnding], None]) -> None:
        self._process, self._ended = process, ended
        self.began = time.monotonic()
        self.ended_at = self.began
        self.about: Mapping[str, str] = {}
        self.refusal: tuple[str, str] | None = None
        self.greeted = asyncio.Event()
        self._asked = 0
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._errors: deque[str] = deque(maxlen=1)
        self._killed = False
        self._listening = asyncio.create_task(self._listen())

    @property
    def alive(self) -> bool:
        return not self._listening.done() and not self._killed

    @property
    def end_reason(self) -> str:
        code = self._process.returncode
        if self._killed:
            how = "hung and was killed"
        elif code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return f"the DRMAA library's process {how}" + (f" ({self._errors[0]})" if self._errors else "")

    async def request(self, operation: str, fields: Mapping[str, object]) -> dict[str, Any]:
        self._asked += 1
        number = self._asked
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "op": operation, **fields}).encode() + b"\n")
            answer: dict[str, Any] = await reply
            return answer
        finally:
            self._replies.pop(number, None)

    def kill(self) -> None:
        self._killed = True
        self.ended_at = time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.close()  # one that is another account's and may not be killed ends by that
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.kill()

    async def over(self) -> None:
        """Wait until the process is gone."""
        await asyncio.wait([self._listening])

    async def close(self) -> None:
        """Have it leave the session in good order, or kill it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait([self._listening], timeout=EXIT_TIMEOUT)
        if not self._listening.done():
            self.kill()
        await self.over()

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        errors = asyncio.create_task(self._read_errors())
        try:
            while line := await self._process.stdout.readline():
                self._receive(json.loads(line))
        except (ValueError, OSError):  # a line cut off
            self.kill()
        finally:
            await errors
            await self._process.wait()
            self.ended_at = time.monotonic()
            self.greeted.set()
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(Unanswered(self.end_reason))

    def _receive(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            self._ended(DrmaaEnding(**message["ended"]))
        elif "hello" in message:
            self.about = message["hello"]
            self.greeted.set()
        elif "failed" in message:
            self.refusal = (message["failed"], message["text"])
        elif (reply := self._replies.get(message["id"])) and not reply.done():
            reply.set_result(message)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):
            async for line in self._process.stderr:
                if text := line.decode(errors="replace").strip():
                    self._errors.append(text[:200])


def _environment(library: str | None, given: Mapping[str, str]) -> dict[str, str]:
    kept = inherited_environment(LRM_VARIABLES, LRM_PREFIXES)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "optional_static_tls" not in tunables:
        tunables = ":".join(filter(None, (tunables, _STATIC_TLS)))
    own = {"GLIBC_TUNABLES": tunables} | ({"DRMAA_LIBRARY_PATH": library} if library else {})
    return kept | own | dict(given)
