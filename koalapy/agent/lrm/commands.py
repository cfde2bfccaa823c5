"""Run the commands of a resource manager, and turn what they say into errors of the site."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from koalapy.agent.lrm.rejections import classify_rejection
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.system.process import TRANSIENT_ERRORS

_CHUNK = 65_536
COMMAND_TIMEOUT = 30.0
"""Seconds that a command has to answer."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    code: int
    output: bytes
    errors: str

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")

    @property
    def error_line(self) -> str:
        """The first line that is not blank, of the errors or else of the output."""
        lines = [line.strip() for line in (self.errors or self.text).splitlines()]
        return next((line for line in lines if line), f"exit code {self.code}")

    def error_text(self, command: str) -> str:
        """All that the command has printed, in one line."""
        lines = (self.errors or self.text).splitlines()
        texts = [re.sub(rf"^{command}: (error|fatal): ", "", line).strip() for line in lines]
        return "; ".join(dict.fromkeys(line for line in texts if line)) or f"exit code {self.code}"


class RunCommand(Protocol):
    """How a command is run: by ``run``, or by a test's stand-in that starts no process."""

    async def __call__(
        self,
        *argv: str,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = COMMAND_TIMEOUT,
    ) -> CommandResult: ...


RunAsUser = Callable[..., Awaitable[CommandResult]]
"""How a command is run as an account, or as the agent itself if its name is empty: ``RunAs.run``."""


class Commands:
    """The commands of one resource manager. All methods raise ``SiteError``."""

    def __init__(
        self,
        run_as: RunAsUser,
        environment: Mapping[str, str],
        transient: re.Pattern[str],
        hints: Sequence[tuple[str, str]],
        unavailable_hint: str = "",
    ) -> None:
        """``transient``: words of errors that may pass; ``hints``: what to do, by words of the others."""
        self.environment = environment
        self._run_as, self._transient, self._hints = run_as, transient, hints
        self._unavailable_hint = unavailable_hint

    async def run(
        self, command: str, *arguments: str, user: str = "", timeout: float = COMMAND_TIMEOUT
    ) -> CommandResult:
        """Return an answer whatever its exit code. Raise ``SiteUnavailable`` if the command may succeed later."""
        answer = await self._run_as(user, command, *arguments, environment=self.environment, timeout=timeout)
        if answer.code and isinstance(error := self.error(os.path.basename(command), answer), SiteUnavailable):
            raise error
        return answer

    async def run_checked(self, command: str, *arguments: str, user: str = "") -> CommandResult:
        """Return the answer of a command that has succeeded."""
        answer = await self.run(command, *arguments, user=user)
        if answer.code:
            raise self.error(command, answer)
        return answer

    def error(self, command: str, answer: CommandResult, value: object = None) -> SiteError:
        """Return what an answer means that did not succeed."""
        if answer.code < 0:
            return SiteUnavailable(f"{command} was killed by signal {-answer.code}")
        text = answer.error_text(command)
        if self._transient.search(text):
            return SiteUnavailable(f"{command}: {text}", hint=self._unavailable_hint)
        return self.rejection(SiteRejected(f"{command}: {text}", value=value))

    def rejection(self, error: SiteRejected) -> SiteRejected:
        """Return an error with the hint and the fault that its words tell."""
        words = error.message.lower()
        hint = next((hint for word, hint in self._hints if word in words), error.hint)
        fault = classify_rejection(error.message) if error.fault is SiteFault.REFUSED else error.fault
        return SiteRejected(error.message, field=error.field, value=error.value, hint=hint, fault=fault)


async def run_command(
    *argv: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"", timeout: float = COMMAND_TIMEOUT
) -> CommandResult:
    """Run a command to its end. Raise ``SiteRejected`` if it is not installed, ``SiteUnavailable`` if it is late.

    A command that is late is killed; what it was to do may have been done all the same.
    """
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=_CHUNK, loop=loop),
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
        is_over = process.returncode is not None or _kill_group(process.pid)
        # Our ends of its pipes: asyncio would wait until what is in them is read, and others have closed theirs.
        # Not the transport itself, which would look how the process ended before asyncio's own watcher can.
        for descriptor in range(3):
            if (pipe := transport.get_pipe_transport(descriptor)) is not None:
                pipe.close()
        if is_over:
            await process.wait()
    return CommandResult(process.returncode or 0, output, errors.decode(errors="replace"))


def _kill_group(group: int) -> bool:
    """Return whether it is gone, or will be: a process of another account may not be ours to kill."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def parse_job_number(command: str, answer: CommandResult) -> str:
    """Return the job number that a submission printed on a line by itself, as ``171`` or ``171;cluster``.

    A site's own texts may stand before and after it. ``SiteUnavailable`` for none or several: the job may exist.
    """
    found = re.findall(r"^[ \t]*([0-9]+)(?:[;.]\S*)?[ \t\r]*$", answer.text, re.MULTILINE)
    if len(found) != 1:
        printed = " ".join((answer.text or answer.errors).split())[:80] or "nothing"
        raise SiteUnavailable(f"{command} printed {'several job numbers' if found else 'no job number'}: {printed}")
    return str(found[0])
