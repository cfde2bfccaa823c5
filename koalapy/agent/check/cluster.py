"""What ``koala check`` looks at on a cluster's head node before the first job, which it leaves as it was."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from koalapy.agent.check.accounts import check_accounts
from koalapy.agent.check.daemon import check_daemon
from koalapy.agent.check.files import check_files, shared_folder
from koalapy.agent.check.login import check_logins
from koalapy.agent.check.node import check_runner
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.components.open_mpi import open_mpi_here
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentSettings, AgentTimeouts
from koalapy.agent.lrm.port import Finding, Lrm
from koalapy.model.errors import SiteError


@dataclass(frozen=True, slots=True)
class Expected:
    """What the configuration says of a cluster, beside what its agent is told."""

    mpi_series: int
    mpi_prefix: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    """By what they are for: scratch, home."""
    own_token: bool = False
    """Whether the daemon starts the agent itself, with a token of its own making."""


async def check_cluster(
    settings: AgentSettings,
    expected: Expected,
    make_lrm: Callable[[], Lrm],
    folders: JobFolders | None = None,
    user: str = "",
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
) -> list[Finding]:
    """Everything that was looked at, in order; ``make_lrm`` may raise ``SiteError``. ``user``: as whom jobs are tried,
    where they run as several accounts."""
    folders = folders or JobFolders.of(settings)
    accounts = await check_accounts(settings, folders, user)
    may_try = all(finding.ok for finding in accounts) and bool(user) == folders.are_many
    findings, on_nodes = await _check_lrm(settings, make_lrm, folders, user if may_try else None, timeouts)
    findings = [*accounts, *findings]
    findings += [await _check_mpi(settings, expected), on_nodes]
    findings.append(_check_directory(settings))
    findings.append(await _check_address(settings))
    findings += [_check_folder(settings.cluster, what, path) for what, path in expected.folders.items()]
    findings += await check_files(settings)
    findings += check_logins(settings)
    return findings + await check_daemon(settings, own_token=expected.own_token)


async def _check_lrm(
    settings: AgentSettings, make_lrm: Callable[[], Lrm], folders: JobFolders, user: str | None, timeouts: AgentTimeouts
) -> tuple[list[Finding], Finding]:
    """Findings about the resource manager; and one about the runner on its nodes, where it lets us try as somebody."""
    try:
        lrm = make_lrm()
    except SiteError as error:
        return [Finding("resource manager", False, error.message, error.hint)], await check_runner(
            settings, None, folders
        )
    try:
        fault: SiteError | None = None
        try:
            await lrm.open()
        except SiteError as error:
            fault = error
        findings = list(await lrm.check_setup())
        if fault is not None and all(finding.ok for finding in findings):
            findings.append(Finding("resource manager", False, fault.message, fault.hint))
        # An embedded cluster's nodes are this host.
        usable = not settings.lrm.on_this_host and all(finding.ok for finding in findings)
        tried = lrm if usable and user is not None else None
        return findings, await check_runner(settings, tried, folders, user or "", timeouts)
    finally:
        await lrm.close()


async def _check_mpi(settings: AgentSettings, expected: Expected) -> Finding:
    """The first ``mpirun`` that a program would find, as far as this host is like the nodes."""
    where = f"clusters.{settings.cluster}.mpi"
    try:
        found = await open_mpi_here(settings, expected.mpi_prefix)
    except SiteError as error:
        return Finding("Open MPI", False, error.message, error.hint)
    hint = f"install it, load a module with it, or set {where}.prefix to where it is"
    # Programs run on the nodes, and their head may have none; modules that do not give one here are worth a look.
    if not found.path and not settings.lrm.on_this_host and not settings.modules:
        return Finding(
            "Open MPI",
            True,
            f"{found.complaint} on this host, where it is not needed",
            f"see that the nodes have it; if not, {hint}",
        )
    if not found.version:
        return Finding("Open MPI", False, found.complaint, hint)
    text = f"{found.version} ({found.path})"
    if found.series != expected.mpi_series:
        hint = f"set {where}.series to {found.series}, or {where}.prefix to where series {expected.mpi_series} is"
        return Finding("Open MPI", False, f"{text}, but {where}.series is {expected.mpi_series}", hint)
    return Finding("Open MPI", True, text)


def _check_directory(settings: AgentSettings) -> Finding:
    """Where the agent keeps what must survive a restart, and the runners what they tell it."""
    return shared_folder(
        settings,
        "agent's directory",
        settings.directory,
        "give another with --directory",
        "give a folder on a shared file system with --directory",
    )


async def _check_address(settings: AgentSettings) -> Finding:
    """Whether the agent can listen for its runners where the nodes can reach it."""
    host, hint = settings.runner_host, f"set clusters.{settings.cluster}.runner_address to one that the nodes reach"
    if not host:
        return Finding("runner address", False, f"no way from here leads to {settings.url}", hint)
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, kind, _, _, address = addresses[0]
        with socket.socket(family, kind) as listener:
            listener.bind(address)
    except OSError as error:
        return Finding("runner address", False, f"cannot listen on {host}: {error.strerror or error}", hint)
    own = ip_address(str(address[0]).partition("%")[0])
    if own.is_unspecified or (own.is_loopback and not settings.lrm.on_this_host):
        what = "stands for every address" if own.is_unspecified else "is for this host only"
        return Finding("runner address", False, f"{host} {what}: the nodes cannot reach it", hint)
    return Finding("runner address", True, host if host == str(own) else f"{host} ({own})")


def _check_folder(cluster: str, what: str, folder: str) -> Finding:
    if Path(folder).is_dir():
        return Finding(f"{what} folder", True, folder)
    return Finding(
        f"{what} folder", False, f"there is no {folder} here", f"make it, or correct clusters.{cluster}.{what}"
    )
