"""Whether jobs can run as their owners' accounts: who the agent may be, and where each has its folders."""

import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from koalapy.agent.accounts.accounts import SwitchMethod
from koalapy.agent.components.job_folders import COMMAND, JobFolders
from koalapy.agent.core.settings import RESOURCE_MANAGERS_BEGIN, AgentSettings, inherited
from koalapy.agent.lrm.commands import run_command
from koalapy.agent.lrm.port import Finding
from koalapy.model.errors import SiteError

PROGRAMS = {"slurm": ("sbatch", "scancel", "sacct"), "sge": ("qsub", "qdel")}
"""By which an agent acts for others, by kind."""
SEE = "see docs/clusters.md, Whose processes"
WAYS = {SwitchMethod.SETUID: "this agent may change its account", SwitchMethod.SUDO: "this agent asks sudo"}


async def check_accounts(settings: AgentSettings, folders: JobFolders, user: str) -> list[Finding]:
    """Nothing where jobs run as the agent itself; ``user`` is somebody to try it for."""
    if not folders.are_many:
        return []
    way, base = folders.run_as.switch_method, settings.accounts_directory
    if way is SwitchMethod.NONE:
        hint = f"run it as root, or with CAP_SETUID and CAP_SETGID, or install sudo: {SEE}"
        return [Finding("acting for others", False, "this agent may act for nobody", hint)]
    findings = [Finding("acting for others", True, WAYS[way], SEE)]
    if base is None:
        return [*findings, Finding("accounts' folders", False, "no stage_directory is set", SEE)]
    findings.append(_check_base(base))
    if not user:
        hint = f"give koala check {settings.cluster} --user ACCOUNT, of somebody who has one here"
        return [*findings, Finding("an account", True, "none was tried", hint)]
    return findings + await _try_for(settings, folders, user)


async def _try_for(settings: AgentSettings, folders: JobFolders, user: str) -> list[Finding]:
    try:
        account = await folders.run_as.accounts.find_account(user)
    except SiteError as error:
        return [Finding("an account", False, error.message, error.hint)]
    groups = ", ".join(map(str, account.groups))
    findings = [Finding("an account", True, f"{user} is uid {account.uid}, of the groups {groups}")]
    if folders.run_as.switch_method is SwitchMethod.SUDO:
        findings += [await _check_rule(program, user) for program in PROGRAMS.get(settings.kind, ())]
        findings.append(await _check_rule(str(Path(settings.python).with_name(COMMAND)), user))
    name = f"work-koala-check-{secrets.token_hex(4)}"
    try:
        folder = folders.folder(user, name)
        await folders.fill(user, folder, {"launch": b"#!/bin/sh\n"})
        found = name in await folders.names(user)
        await folders.remove(user, folder)
    except SiteError as error:
        hint = error.hint or f"let {user} pass through to {settings.accounts_directory}, and read {settings.python}"
        return [*findings, Finding("an account's folder", False, error.message, hint)]
    return [*findings, Finding("an account's folder", found, f"{folder.parent}, made, filled and emptied as {user}")]


async def _check_rule(program: str, user: str) -> Finding:
    """Whether sudo would let this agent run it, and without a password."""
    place = shutil.which(program) or program
    environment = inherited(["SLURM_CONF"], RESOURCE_MANAGERS_BEGIN)
    answer = await run_command("sudo", "-n", "-l", "-u", user, "--", place, environment=environment)
    if answer.code == 0:
        return Finding(f"sudo for {os.path.basename(place)}", True, f"{place} may be run as {user}")
    hint = f"add {place} to the agent's rules, with NOPASSWD: {SEE}"
    return Finding(f"sudo for {os.path.basename(place)}", False, f"{answer.error_line}", hint)


def _check_base(base: Path) -> Finding:
    """Each account makes a folder of its own there, and must be able to pass through all above it."""
    what = "accounts' folders"
    closed = [path for path in _there(base) if not path.stat().st_mode & stat.S_IXOTH and path != base]
    if closed:
        hint = f"chmod o+x {closed[-1]}, or set another stage_directory"
        return Finding(what, False, f"{base}: not every account may pass through {closed[-1]}", hint)
    if base.is_dir() and base.stat().st_uid != os.geteuid():
        hint = f"chown it to uid {os.geteuid()}, or set another stage_directory"
        return Finding(what, False, f"{base} is uid {base.stat().st_uid}'s, and not this agent's", hint)
    return Finding(what, True, f"{base}, one for each account")


def _there(base: Path) -> Sequence[Path]:
    return [path for path in (base, *base.parents) if path.exists()]
