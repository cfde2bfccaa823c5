"""Try accounts and the runner for real, and remove everything that was made.

The runner is tried by the smallest job that the cluster takes: does it run on a node, and under which Python?
"""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from koalapy.agent.accounts import SwitchMethod
from koalapy.agent.components.job_folders import COMMAND, JobFolders
from koalapy.agent.core.settings import (
    DEFAULT_TIMEOUTS,
    LRM_PREFIXES,
    RUNNER,
    AgentSettings,
    AgentTimeouts,
    inherited_environment,
)
from koalapy.agent.core.spool import RUNNER_LOG, JournalFolder
from koalapy.agent.lrm.commands import run_command
from koalapy.agent.lrm.port import Finding, Lrm, LrmJobState, LrmSubmission
from koalapy.model.errors import SiteError

PROGRAMS = {"slurm": ("sbatch", "scancel", "sacct"), "sge": ("qsub", "qdel")}
"""Programs that the agent runs as other accounts, by kind of resource manager."""
SEE = "see docs/clusters.md, Job accounts"
SWITCH_METHODS = {
    SwitchMethod.SETUID: "this agent changes its account itself",
    SwitchMethod.SUDO: "this agent uses sudo",
}
TRIAL_SUBJECT = "Python on the nodes"
MIN_PYTHON = (3, 9)
PROBE = """\
import sys
sys.stdout.write("koala-python %d.%d.%d\\n" % sys.version_info[:3])
sys.stdout.write("koala-uid %d\\n" % __import__("os").getuid())
sys.stdout.flush()
sys.argv = [sys.argv[1], "check"]
own = {"__name__": "__main__", "__file__": sys.argv[0], "__package__": None}
exec(compile(open(sys.argv[0], "rb").read(), sys.argv[0], "exec"), own)
"""
"""Runs under any Python: prints its version, then runs the runner's self-check, which an old one cannot read."""
TRIAL_WALLTIME_S = 60.0


async def check_accounts(settings: AgentSettings, folders: JobFolders, user: str) -> list[Finding]:
    """Check that jobs can run as their owners' accounts; return no findings where they run as the agent itself.

    ``user``: the account to try.
    """
    if not folders.is_mapped:
        return []
    method, base = folders.run_as.switch_method, settings.accounts_directory
    if method is SwitchMethod.NONE:
        hint = f"run it as root, or with CAP_SETUID and CAP_SETGID, or install sudo: {SEE}"
        return [Finding("other accounts", False, "this agent cannot run anything as other accounts", hint)]
    findings = [Finding("other accounts", True, SWITCH_METHODS[method], SEE)]
    if base is None:
        return [*findings, Finding("account folders", False, "no stage_directory is set", SEE)]
    findings.append(_check_base_folder(base))
    if not user:
        hint = f"run koala check {settings.cluster} --user ACCOUNT, with an account that runs jobs here"
        return [*findings, Finding("account", True, "none was tried", hint)]
    try:
        account = await folders.run_as.accounts.find_account(user)
    except SiteError as error:
        return [*findings, Finding("account", False, error.message, error.hint)]
    groups = ", ".join(map(str, account.groups))
    findings.append(Finding("account", True, f"{user} has uid {account.uid} and the groups {groups}"))
    if method is SwitchMethod.SUDO:
        findings += [await _check_sudo_rule(program, user) for program in PROGRAMS.get(settings.kind, ())]
        findings.append(await _check_sudo_rule(str(Path(settings.python).with_name(COMMAND)), user))
    name = f"work-koala-check-{secrets.token_hex(4)}"
    try:
        folder = folders.folder_path(user, name)
        await folders.make_folder(user, folder, {"launch": b"#!/bin/sh\n"})
        exists = name in await folders.list_names(user)
        await folders.remove_folder(user, folder)
    except SiteError as error:
        hint = error.hint or f"let {user} pass through to {settings.accounts_directory}, and read {settings.python}"
        return [*findings, Finding("account folder", False, error.message, hint)]
    return [*findings, Finding("account folder", exists, f"{folder.parent}, made, filled and emptied as {user}")]


def _check_base_folder(base: Path) -> Finding:
    """Check that the folder of all accounts' folders belongs to the agent and that every account can enter it."""
    subject = "account folders"
    try:
        closed = [path for path in base.parents if os.path.exists(path) and not path.stat().st_mode & stat.S_IXOTH]
        if closed:
            hint = f"chmod o+x {closed[-1]}, or set another stage_directory"
            return Finding(subject, False, f"{base}: not every account can pass through {closed[-1]}", hint)
        if base.is_dir() and base.stat().st_uid != os.geteuid():
            hint = f"chown it to uid {os.geteuid()}, or set another stage_directory"
            return Finding(subject, False, f"{base} belongs to uid {base.stat().st_uid}, not to this agent", hint)
    except OSError as error:
        return Finding(subject, False, f"{base} cannot be reached: {error.strerror}", "set another stage_directory")
    return Finding(subject, True, f"{base}, one for each account")


async def _check_sudo_rule(program: str, user: str) -> Finding:
    """Check that sudo lets this agent run a program as ``user`` without a password."""
    path = shutil.which(program) or program
    subject = f"sudo for {os.path.basename(path)}"
    environment = inherited_environment(["SLURM_CONF"], LRM_PREFIXES)
    answer = await run_command("sudo", "-n", "-l", "-u", user, "--", path, environment=environment)
    if answer.code == 0:
        return Finding(subject, True, f"{path} may be run as {user}")
    return Finding(subject, False, answer.error_line, f"add {path} to the agent's rules, with NOPASSWD: {SEE}")


async def check_runner(
    settings: AgentSettings,
    lrm: Lrm | None,
    folders: JobFolders,
    user: str = "",
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
) -> Finding:
    """Run the probe in a job, as ``user`` if given; without ``lrm``, or if no node is free, on this host."""
    hint = (
        f"set clusters.{settings.cluster}.python to a Python {_version_text(MIN_PYTHON)} or newer that the nodes have"
    )
    try:
        if lrm is None:
            return await _try_on_this_host(settings, hint)
        trial = await _try_on_node(settings, lrm, folders, user, timeouts)
        if trial is not None:
            output, node = trial
            if user and (problem := await describe_wrong_account(output, folders, user)):
                hint = "give the account the same uid on the head node and on all nodes"
                return Finding(TRIAL_SUBJECT, False, f"{problem} on {node}", hint)
            return _judge_output(settings, output, node, hint)
        local = await _try_on_this_host(settings, hint)
        no_node = f"no node was free within {timeouts.trial_node_s:g} s to try it on"
        return Finding(
            TRIAL_SUBJECT, local.ok, f"{local.result}; {no_node}", local.hint or "check again when a node is free"
        )
    except SiteError as error:
        return Finding(TRIAL_SUBJECT, False, error.message, error.hint or hint)
    except OSError as error:
        return Finding(TRIAL_SUBJECT, False, f"cannot try it: {error}", hint)


async def _try_on_this_host(settings: AgentSettings, hint: str) -> Finding:
    answer = await run_command(*_probe_command(settings))
    return _judge_output(settings, answer.text + answer.errors, "this host", hint)


def _judge_output(settings: AgentSettings, output: str, host: str, hint: str) -> Finding:
    """Return whether a trial's output shows that Python is recent enough and runs the runner on a host."""
    version = re.search(r"koala-python (\d+)\.(\d+)\.(\d+)", output)
    runner_host = re.search(r"koala-runner (\S+)", output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if version is None:
        problem = f"{settings.python} does not run as Python on {host}: {lines[-1] if lines else 'no output'}"
        return Finding(TRIAL_SUBJECT, False, problem, hint)
    version_text = version[0].split()[1]
    if runner_host and host != "this host":
        host = runner_host[1]
    if (int(version[1]), int(version[2])) < MIN_PYTHON:
        problem = f"{settings.python} is {version_text} on {host}, older than {_version_text(MIN_PYTHON)}"
        return Finding(TRIAL_SUBJECT, False, problem, hint)
    if runner_host is None:
        problem = f"the runner does not run on {host} under {version_text}: {lines[-1]}"
        return Finding(TRIAL_SUBJECT, False, problem, f"correct what the error says, or {hint}")
    return Finding(TRIAL_SUBJECT, True, f"{version_text} ({settings.python} on {host}), which runs the runner")


def _version_text(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def _probe_command(settings: AgentSettings) -> tuple[str, ...]:
    return (settings.python, "-I", "-S", "-c", PROBE, str(RUNNER))


async def describe_wrong_account(output: str, folders: JobFolders, user: str) -> str:
    """Return a sentence about the account that a trial job ran as; empty if that was ``user``, or is not known."""
    account, uid = await folders.run_as.accounts.find_account(user), re.search(r"koala-uid (\d+)", output)
    if uid is None or int(uid[1]) == account.uid:
        return ""
    return f"{user} is uid {account.uid} here, and a job of that account runs as uid {uid[1]}"


async def _try_on_node(
    settings: AgentSettings, lrm: Lrm, folders: JobFolders, user: str, timeouts: AgentTimeouts
) -> tuple[str, str] | None:
    """Run the probe in a job, and return its output and node; None if no node was free in time.

    Raise ``SiteError`` if the resource manager does not take the job.
    """
    directory = settings.directory.absolute()
    shared = next(parent for parent in (directory, *directory.parents) if parent.exists())
    folder = Path(tempfile.mkdtemp(prefix=".koala-check-", dir=shared))
    name = f"koala-check-{secrets.token_hex(4)}"
    workdir = folders.folder_path(user, f"work-{name}") if user else folder
    output = workdir / RUNNER_LOG

    async def fetch() -> None:
        if user:
            await folders.fetch_results(user, workdir, JournalFolder(folder), 1, 0)

    try:
        submission = LrmSubmission(
            name,
            min((sizes.least for sizes in (await lrm.take_snapshot()).job_sizes), default=1),
            _probe_command(settings),
            settings.environment,
            workdir,
            output,
            TRIAL_WALLTIME_S,
            settings.modules,
            user,
        )
        job = await lrm.submit_job(submission)
        try:
            node = await _wait_for_end(lrm, job, timeouts)
        finally:
            await lrm.cancel_job(job, name, user)
        if node is None:
            return None
        return await _read_output(fetch, folder / RUNNER_LOG, timeouts), node or "a node"
    finally:
        if user:
            with contextlib.suppress(SiteError):
                await folders.remove_folder(user, workdir)
        shutil.rmtree(folder, ignore_errors=True)


async def _wait_for_end(lrm: Lrm, job_id: str, timeouts: AgentTimeouts) -> str | None:
    """Return the first node of the job when it has ended, empty if it was never shown; None after the timeout."""
    deadline, node, was_listed = time.monotonic() + timeouts.trial_node_s, "", False
    while True:
        job = next((job for job in (await lrm.take_snapshot()).jobs if job.id == job_id), None)
        if job is not None:
            was_listed, node = True, next(iter(job.nodes), node)
        if was_listed if job is None else job.state is LrmJobState.ENDED:
            return node
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(timeouts.trial_poll_s)


async def _read_output(fetch: Callable[[], Awaitable[None]], path: Path, timeouts: AgentTimeouts) -> str:
    """Return the probe's output; a shared file system may show it late. ``fetch`` is awaited before each look."""
    deadline = time.monotonic() + timeouts.trial_output_s
    while True:
        await fetch()
        text = _read_text(path)
        if "koala-runner" in text or time.monotonic() > deadline:
            return text
        await asyncio.sleep(timeouts.trial_poll_s)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
