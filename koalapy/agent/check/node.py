"""Check that the runner runs on a node, and under which Python, by the smallest job that the cluster takes."""

import asyncio
import contextlib
import re
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, RUNNER, AgentSettings, AgentTimeouts
from koalapy.agent.core.spool import RUNNER_LOG, Folder
from koalapy.agent.lrm.commands import run_command
from koalapy.agent.lrm.port import Finding, Lrm, LrmJobState, LrmSubmission
from koalapy.model.errors import SiteError

CHECKED = "Python on the nodes"
MIN_PYTHON = (3, 9)
CODE = """\
import sys
sys.stdout.write("koala-python %d.%d.%d\\n" % sys.version_info[:3])
sys.stdout.write("koala-uid %d\\n" % __import__("os").getuid())
sys.stdout.flush()
sys.argv = [sys.argv[1], "check"]
own = {"__name__": "__main__", "__file__": sys.argv[0], "__package__": None}
exec(compile(open(sys.argv[0], "rb").read(), sys.argv[0], "exec"), own)
"""
"""For any Python: says which one it is before it tries the runner, which an old one cannot read."""
WALLTIME = 60.0


@dataclass(frozen=True, slots=True)
class TrialOutput:
    """What was written, and where: empty while nobody knows."""

    output: str
    node: str = ""
    ran: bool = True


async def check_runner(
    settings: AgentSettings,
    lrm: Lrm | None,
    folders: JobFolders,
    user: str = "",
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
) -> Finding:
    """Tried on a node through ``lrm``, as ``user`` if one is named; without one, or where no node is free, on this
    host, which it says."""
    hint = f"set clusters.{settings.cluster}.python to a Python {_version(MIN_PYTHON)} or newer that the nodes have"
    try:
        if lrm is None:
            return _judge(settings, await _try_here(settings), "this host", hint)
        tried = await _try_there(settings, lrm, folders, user, timeouts)
        if tried.ran and user and (problem := await _not_the_same(tried, folders, user)):
            hint = "give the account the same number on the head and on all nodes"
            return Finding(CHECKED, False, f"{problem} on {tried.node or 'a node'}", hint)
        if tried.ran:
            return _judge(settings, tried, tried.node or "a node", hint)
        here = _judge(settings, await _try_here(settings), "this host", hint)
        no_node = f"no node was free within {timeouts.trial_node_s:g} s to try it on"
        return Finding(CHECKED, here.ok, f"{here.result}; {no_node}", here.hint or "look again when there is one")
    except SiteError as error:
        return Finding(CHECKED, False, error.message, error.hint or hint)
    except OSError as error:
        return Finding(CHECKED, False, f"cannot try it: {error}", hint)


def _judge(settings: AgentSettings, tried: TrialOutput, where: str, hint: str) -> Finding:
    version = re.search(r"koala-python (\d+)\.(\d+)\.(\d+)", tried.output)
    runs = re.search(r"koala-runner (\S+)", tried.output)
    lines = [line.strip() for line in tried.output.splitlines() if line.strip()]
    if version is None:
        return Finding(
            CHECKED, False, f"{settings.python} is none on {where}: {lines[-1] if lines else 'no answer'}", hint
        )
    version_text, where = version[0].split()[1], runs[1] if runs and where != "this host" else where
    if (int(version[1]), int(version[2])) < MIN_PYTHON:
        wanted = _version(MIN_PYTHON)
        return Finding(CHECKED, False, f"{settings.python} is {version_text} on {where}, older than {wanted}", hint)
    if runs is None:
        hint = f"correct what it says, or {hint}"
        return Finding(CHECKED, False, f"the runner does not run on {where} under {version_text}: {lines[-1]}", hint)
    return Finding(CHECKED, True, f"{version_text} ({settings.python} on {where}), which runs the runner")


def _version(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def _command(settings: AgentSettings) -> tuple[str, ...]:
    return (settings.python, "-I", "-S", "-c", CODE, str(RUNNER))


async def _try_here(settings: AgentSettings) -> TrialOutput:
    answer = await run_command(*_command(settings))
    return TrialOutput(answer.output.decode(errors="replace") + answer.errors)


async def _not_the_same(tried: TrialOutput, folders: JobFolders, user: str) -> str:
    """Whom a job of somebody's ran as instead, in words."""
    account, found = await folders.run_as.accounts.find_account(user), re.search(r"koala-uid (\d+)", tried.output)
    if found is None or int(found[1]) == account.uid:
        return ""
    return f"{user} is uid {account.uid} here, and a job of that account runs as uid {found[1]}"


async def _try_there(
    settings: AgentSettings, lrm: Lrm, folders: JobFolders, user: str, timeouts: AgentTimeouts
) -> TrialOutput:
    """``SiteError`` when the resource manager does not take the job."""
    directory = settings.directory.absolute()
    shared = next(parent for parent in (directory, *directory.parents) if parent.exists())
    folder = Path(tempfile.mkdtemp(prefix=".koala-check-", dir=shared))
    name = f"koala-check-{secrets.token_hex(4)}"
    work = folders.folder(user, f"work-{name}") if user else folder
    output = work / RUNNER_LOG
    own = (settings.environment, work, output, WALLTIME, settings.modules, user)
    try:
        size = (await lrm.take_snapshot()).min_job_nodes
        job = await lrm.submit_job(LrmSubmission(name, size, _command(settings), *own))
        try:
            node = await _wait_for_end(lrm, job, timeouts)
        finally:
            await lrm.cancel_job(job, name, user)
        if node is None:
            return TrialOutput("", ran=False)
        if user:
            return TrialOutput(await _fetched(folders, user, work, folder, timeouts), node)
        return TrialOutput(await _wait_for_output(output, timeouts), node)
    finally:
        if user:
            with contextlib.suppress(SiteError):
                await folders.remove(user, work)
        shutil.rmtree(folder, ignore_errors=True)


async def _wait_for_end(lrm: Lrm, job: str, timeouts: AgentTimeouts) -> str | None:
    """Where it ran, as far as that is known, once it has ended; None when it does not in time."""
    give_up, node, seen = time.monotonic() + timeouts.trial_node_s, "", False
    while True:
        found = next((each for each in (await lrm.take_snapshot()).jobs if each.id == job), None)
        if found is not None:
            seen, node = True, next(iter(found.nodes), node)
        if (found is None and seen) or (found is not None and found.state is LrmJobState.ENDED):
            return node
        if time.monotonic() > give_up:
            return None
        await asyncio.sleep(timeouts.trial_poll_s)


async def _fetched(folders: JobFolders, user: str, work: Path, into: Path, timeouts: AgentTimeouts) -> str:
    give_up = time.monotonic() + timeouts.trial_output_s
    while True:
        await folders.fetch(user, work, Folder(into), 1, 0)
        text = _text(into / RUNNER_LOG)
        if "koala-runner" in text or time.monotonic() > give_up:
            return text
        await asyncio.sleep(timeouts.trial_poll_s)


async def _wait_for_output(output: Path, timeouts: AgentTimeouts) -> str:
    give_up = time.monotonic() + timeouts.trial_output_s
    while True:
        text = _text(output)
        if "koala-runner" in text or time.monotonic() > give_up:
            return text
        await asyncio.sleep(timeouts.trial_poll_s)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
