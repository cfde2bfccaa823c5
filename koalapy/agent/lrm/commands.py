"""Run the commands of a resource manager, and convert their messages to site errors."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from koalapy.agent.lrm.rejections import classify_rejection, explain_rejection, names_too_many_nodes
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.system.process import TRANSIENT_ERRORS

_CHUNK_BYTES = 65_536
COMMAND_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit code and output of a command."""

    code: int
    output: bytes
    errors: str

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")

    @property
    def error_line(self) -> str:
        """The first line that is not blank, of the errors or else the output."""
        lines = [line.strip() for line in (self.errors or self.text).splitlines()]
        return next((line for line in lines if line), f"exit code {self.code}")

    def error_text(self, command: str) -> str:
        """Return the errors, or else the output, in one line."""
        lines = (self.errors or self.text).splitlines()
        texts = [re.sub(rf"^{command}: (error|fatal): ", "", line).strip() for line in lines]
        return "; ".join(dict.fromkeys(line for line in texts if line)) or f"exit code {self.code}"


RunCommand = Callable[..., Awaitable[CommandResult]]
"""``run_command``, or what replaces it in tests; ``RunAs.run`` takes the account too, empty for the agent's own."""


@dataclass(eq=False)
class Commands:
    """Runs the commands of one resource manager. Methods raise ``SiteError``."""

    _run_as: RunCommand
    environment: Mapping[str, str]
    _transient: re.Pattern[str]
    """Pattern of errors worth a retry."""
    _hints: Sequence[tuple[re.Pattern[str], str]] = ()
    """For failed queries."""
    _unavailable_hint: str = ""

    async def run(
        self, command: str, *arguments: str, user: str = "", timeout: float = COMMAND_TIMEOUT_S
    ) -> CommandResult:
        """Run a command and return its result. Raise ``SiteUnavailable`` if it failed and may succeed later."""
        answer = await self._run_as(user, command, *arguments, environment=self.environment, timeout=timeout)
        if answer.code and isinstance(error := self.error(os.path.basename(command), answer), SiteUnavailable):
            raise error
        return answer

    async def run_checked(self, command: str, *arguments: str, user: str = "") -> CommandResult:
        """Run a command and return its result. Raise ``SiteError`` if it failed."""
        answer = await self.run(command, *arguments, user=user)
        if answer.code:
            raise self.error(command, answer)
        return answer

    def error(self, command: str, answer: CommandResult, value: object = None) -> SiteError:
        """Return the error of a failed command."""
        if answer.code < 0:
            return SiteUnavailable(f"{command} was killed by signal {-answer.code}")
        text = answer.error_text(command)
        if self._transient.search(text):
            return SiteUnavailable(f"{command}: {text}", hint=self._unavailable_hint)
        return self.rejection(SiteRejected(f"{command}: {text}", value=value))

    def rejection(self, error: SiteRejected) -> SiteRejected:
        """Return a rejection with the hint and the fault that its text implies."""
        hints = (hint for pattern, hint in self._hints if pattern.search(error.message))
        hint = next(hints, "") or explain_rejection(error.message) or error.hint
        fault = classify_rejection(error.message) if error.fault is SiteFault.REFUSED else error.fault
        sizes = error.sizes or ("many" if names_too_many_nodes(error.message) else "")
        return SiteRejected(error.message, field=error.field, value=error.value, hint=hint, fault=fault, sizes=sizes)


async def run_command(
    *argv: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"", timeout: float = COMMAND_TIMEOUT_S
) -> CommandResult:
    """Run a command to its end. Raise ``SiteRejected`` if it is not installed, ``SiteUnavailable`` after the timeout.

    The timeout kills the command, which may have had its effect.
    """
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=_CHUNK_BYTES, loop=loop),
            *argv,
            env=None if environment is None else dict(environment),
            start_new_session=True,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        if error.errno in TRANSIENT_ERRORS:
            raise SiteUnavailable(f"cannot run {argv[0]} now: {error.strerror}") from error
        raise SiteRejected(
            f"cannot run {argv[0]}: {error.strerror}",
            fault=SiteFault.SITE,
            hint="install it on this host, or put it on the agent's PATH",
        ) from error
    process = asyncio.subprocess.Process(transport, protocol, loop)
    try:
        async with asyncio.timeout(timeout):
            output, errors = await process.communicate(stdin or None)
    except TimeoutError as error:
        raise SiteUnavailable(f"{argv[0]} did not answer within {timeout:g} s") from error
    finally:
        will_end = process.returncode is not None or _kill_group(process.pid)
        # Close the pipes: asyncio would wait until they are read and all other processes have closed them.
        # The transport stays open: closing it would reap the process before asyncio's watcher does.
        for descriptor in range(3):
            if (pipe := transport.get_pipe_transport(descriptor)) is not None:
                pipe.close()
        if will_end:
            await process.wait()
    return CommandResult(process.returncode or 0, output, errors.decode(errors="replace"))


def _kill_group(group: int) -> bool:
    """Kill a process group; return False if it belongs to another account."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def parse_job_number(command: str, answer: CommandResult) -> str:
    """Return the job number that a submission printed on its own line, as ``171`` or ``171;cluster``.

    Wrapper scripts may print text around it. Raise ``SiteUnavailable`` for none or several, since the job may exist.
    """
    numbers = re.findall(r"^[ \t]*([0-9]+)(?:[;.]\S*)?[ \t\r]*$", answer.text, re.MULTILINE)
    if len(numbers) != 1:
        printed = " ".join((answer.text or answer.errors).split())[:80] or "nothing"
        raise SiteUnavailable(f"{command} printed {'several job numbers' if numbers else 'no job number'}: {printed}")
    return str(numbers[0])
