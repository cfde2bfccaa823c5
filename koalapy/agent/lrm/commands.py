"""Running a resource manager's own commands."""

import asyncio
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable
from koalapy.system.limits import RUN_OUT

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
    def error_line(self) -> str:
        """The first line that says something, for people."""
        lines = [line.strip() for line in (self.errors or self.output.decode(errors="replace")).splitlines()]
        return next((line for line in lines if line), f"exit code {self.code}")


class RunCommand(Protocol):
    """How a command is run: by ``run``, or by a test's stand-in that starts no process."""

    async def __call__(
        self,
        *argv: str,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = COMMAND_TIMEOUT,
    ) -> CommandResult: ...


async def run(
    *argv: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"", timeout: float = COMMAND_TIMEOUT
) -> CommandResult:
    """Run a command to its end; ``SiteRejected`` when there is none of that name, ``SiteUnavailable`` when it is late.

    A command that was given up is killed; what it asked for may have been done all the same.
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
        if error.errno in RUN_OUT:
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
        is_over = process.returncode is not None or _kill(process.pid)
        # Our ends of its pipes: asyncio would wait until what is in them is read, and others have closed theirs.
        # Not the transport itself, which would look how the process ended before asyncio's own watcher can.
        for descriptor in range(3):
            if (pipe := transport.get_pipe_transport(descriptor)) is not None:
                pipe.close()
        if is_over:
            await process.wait()
    return CommandResult(process.returncode or 0, output, errors.decode(errors="replace"))


def _kill(group: int) -> bool:
    """Whether it is gone, or will be: what runs as another account may not be ours to kill."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def printed_job(command: str, answer: CommandResult) -> str:
    """Return the job number that a submission printed on a line by itself, as ``171`` or ``171;cluster``.

    A site's own texts may stand before and after it. ``SiteUnavailable`` for none or several: the job may exist.
    """
    output = answer.output.decode(errors="replace")
    found = re.findall(r"^[ \t]*([0-9]+)(?:[;.]\S*)?[ \t\r]*$", output, re.MULTILINE)
    if len(found) != 1:
        printed = " ".join((output or answer.errors).split())[:80] or "nothing"
        raise SiteUnavailable(f"{command} printed {'several job numbers' if found else 'no job number'}: {printed}")
    return str(found[0])


def split_options(text: str) -> Sequence[str]:
    """Options from the configuration as a shell would split them; ``SiteRejected`` when it could not."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SiteRejected(f"native_specification {text!r}: {error}", fault=SiteFault.SITE) from error
