"""Check a cluster's head node before the first job. Leave everything as it was."""

import asyncio
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from koalapy.agent.check.trial import check_accounts, check_runner
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentSettings, AgentTimeouts
from koalapy.agent.lrm.commands import run_command
from koalapy.agent.lrm.port import Finding, Lrm
from koalapy.agent.lrm.script import open_mpi_here
from koalapy.agent.transfers.exports import RSYNC
from koalapy.model.errors import ProblemCode, SiteError
from koalapy.relay.client import MAX_LINE
from koalapy.runner.folders import short_socket_path
from koalapy.system.files import DIRECTORY, open_socket_folder
from koalapy.system.tls import explain_tls_error

SHARED_FILE_SYSTEMS = (
    *("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb"),
    *("gluster", "afs", "panfs", "pvfs", "orangefs", "weka"),
)
"""Prefixes of the types of file systems that several hosts can mount."""
WRONG_URL_STATUSES = (400, 421)
"""Statuses of the daemon for plain HTTP where it speaks TLS, and for a host name that is not its own."""
DAEMON_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Expected:
    """The part of a cluster's configuration that is not in its agent's settings."""

    mpi_series: int
    mpi_prefix: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    """Paths by the name of their setting: scratch, home."""
    own_token: bool = False
    """Whether the daemon starts the agent itself, with a token that it creates."""


async def check_cluster(
    settings: AgentSettings,
    expected: Expected,
    make_lrm: Callable[[], Lrm],
    folders: JobFolders | None = None,
    user: str = "",
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
) -> list[Finding]:
    """Return all findings, in order.

    ``make_lrm`` may raise ``SiteError``. ``user``: the account that runs the trial job, where jobs run as several.
    """
    folders = folders or JobFolders.from_settings(settings)
    findings = await check_accounts(settings, folders, user)
    accounts_work = all(finding.ok for finding in findings) and bool(user) == folders.is_mapped
    lrm_findings, runner = await _check_lrm(settings, make_lrm, folders, user if accounts_work else None, timeouts)
    findings += [*lrm_findings, await _check_mpi(settings, expected), runner]
    findings.append(
        _check_shared_folder(
            settings,
            "agent's directory",
            settings.directory,
            "give another with --directory",
            "give a folder on a shared file system with --directory",
        )
    )
    findings.append(await _check_runner_address(settings))
    findings += [_check_folder(settings.cluster, name, path) for name, path in expected.folders.items()]
    setting = f"set clusters.{settings.cluster}.stage_directory"
    findings += [
        await _check_rsync(),
        _check_shared_folder(
            settings,
            "stage directory",
            settings.stages,
            f"{setting} to another",
            f"{setting} to a folder on a shared file system",
        ),
        *_check_replica_directories(settings),
        await check_relay(settings),
        *check_logins(settings),
        *await check_daemon(settings, own_token=expected.own_token),
    ]
    return findings


async def _check_lrm(
    settings: AgentSettings, make_lrm: Callable[[], Lrm], folders: JobFolders, user: str | None, timeouts: AgentTimeouts
) -> tuple[list[Finding], Finding]:
    """Return the findings about the resource manager, and one about the runner.

    The runner is tried on a node if the resource manager works and ``user`` is not None.
    """
    try:
        lrm = make_lrm()
    except SiteError as error:
        finding = Finding("resource manager", False, error.message, error.hint)
        return [finding], await check_runner(settings, None, folders)
    try:
        open_error: SiteError | None = None
        try:
            await lrm.open()
        except SiteError as error:
            open_error = error
        findings = list(await lrm.check_setup())
        if open_error is not None and all(finding.ok for finding in findings):
            findings.append(Finding("resource manager", False, open_error.message, open_error.hint))
        # An embedded cluster's nodes are this host.
        is_usable = not settings.lrm.on_this_host and all(finding.ok for finding in findings)
        trial_lrm = lrm if is_usable and user is not None else None
        return findings, await check_runner(settings, trial_lrm, folders, user or "", timeouts)
    finally:
        await lrm.close()


async def _check_mpi(settings: AgentSettings, expected: Expected) -> Finding:
    """Check the first ``mpirun`` that a program would find, as far as this host is like the nodes."""
    setting = f"clusters.{settings.cluster}.mpi"
    try:
        mpi = await open_mpi_here(settings, expected.mpi_prefix)
    except SiteError as error:
        return Finding("Open MPI", False, error.message, error.hint)
    hint = f"install it, load a module with it, or set {setting}.prefix to its folder"
    # Programs run on the nodes, and the head node may have no Open MPI. Modules that provide none are a problem.
    if not mpi.path and not settings.lrm.on_this_host and not settings.modules:
        return Finding(
            "Open MPI",
            True,
            f"{mpi.complaint} on this host, where it is not needed",
            f"see that the nodes have it; if not, {hint}",
        )
    if not mpi.version:
        return Finding("Open MPI", False, mpi.complaint, hint)
    text = f"{mpi.version} ({mpi.path})"
    if mpi.series != expected.mpi_series:
        hint = (
            f"set {setting}.series to {mpi.series}, or {setting}.prefix to the folder of series {expected.mpi_series}"
        )
        return Finding("Open MPI", False, f"{text}, but {setting}.series is {expected.mpi_series}", hint)
    return Finding("Open MPI", True, text)


async def _check_runner_address(settings: AgentSettings) -> Finding:
    """Check that the agent can listen at an address that the nodes reach."""
    host, hint = settings.runner_host, f"set clusters.{settings.cluster}.runner_address to one that the nodes reach"
    if not host:
        return Finding("runner address", False, f"this host has no route to {settings.url}", hint)
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, kind, _, _, address = addresses[0]
        with socket.socket(family, kind) as listener:
            listener.bind(address)
    except OSError as error:
        return Finding("runner address", False, f"cannot listen on {host}: {error.strerror or error}", hint)
    ip = ip_address(str(address[0]).partition("%")[0])
    if ip.is_unspecified or (ip.is_loopback and not settings.lrm.on_this_host):
        problem = "stands for every address" if ip.is_unspecified else "is for this host only"
        return Finding("runner address", False, f"{host} {problem}: the nodes cannot reach it", hint)
    return Finding("runner address", True, host if host == str(ip) else f"{host} ({ip})")


def _check_folder(cluster: str, name: str, path: str) -> Finding:
    problem = f"there is no {path} here"
    try:
        if Path(path).is_dir():
            return Finding(f"{name} folder", True, path)
    except OSError as error:
        problem = f"{path} cannot be reached: {error.strerror}"
    return Finding(f"{name} folder", False, problem, f"make it, or correct clusters.{cluster}.{name}")


FIXED_RSYNC = 3, 4
"""The first version in which a site that may pull a file cannot run code by it (CVE-2024-12084 and later ones)."""
RSYNC_WARNING = (
    ", older than 3.4: make sure that its package has the fixes of CVE-2024-12084 to -12088, as those of the "
    "supported releases of Debian, Ubuntu and Red Hat have; else other sites may run code here"
)


async def _check_rsync() -> Finding:
    """Check that rsync, which sends files between clusters, runs on this host."""
    hint = "install rsync on this host: files are sent to and from other clusters with it"
    try:
        answer = await run_command(RSYNC, "--version")
    except SiteError as error:
        return Finding("rsync", False, error.message, hint)
    version = re.search(r"version v?([\d.]+)", answer.text)
    if answer.code or version is None:
        return Finding("rsync", False, f"{RSYNC} --version prints no version: {answer.error_line}", hint)
    numbers = tuple(int(number) for number in version[1].split(".")[:2] if number)
    return Finding("rsync", True, version[1] + (RSYNC_WARNING if numbers < FIXED_RSYNC else ""))


def _check_replica_directories(settings: AgentSettings) -> list[Finding]:
    """Check that the folders from which this cluster offers replicas can be read. Skip those that the agent creates."""
    setting = f"clusters.{settings.cluster}.replica_directories"
    if not settings.replica_directories:
        hint = f"if files of jobs lie on this cluster, name the folders in {setting}"
        return [Finding("replica directories", True, "none: this cluster has no replicas to offer", hint)]
    findings = []
    for path in settings.replica_directories:
        try:
            os.listdir(path)
            findings.append(Finding("replica directory", True, str(path)))
        except OSError as error:
            if settings.lrm.on_this_host and isinstance(error, FileNotFoundError):
                continue  # The agent makes it.
            problem = f"{path} cannot be read: {error.strerror}"
            findings.append(Finding("replica directory", False, problem, f"make it readable, or correct {setting}"))
    return findings


def _check_shared_folder(
    settings: AgentSettings, subject: str, folder: Path, other_hint: str, shared_hint: str
) -> Finding:
    """Check a folder that the agent writes to and that the nodes must see.

    ``other_hint`` and ``shared_hint``: how to give another folder, and a shared one.
    """
    existing = path = folder.absolute()
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        # Only a trial is certain: a file system may be read-only or full, or reject root.
        with tempfile.TemporaryDirectory(prefix=".koala-check-", dir=existing):
            pass
    except OSError as error:
        problem = f"{path} cannot be {'written to' if existing == path else 'made'}: {error.strerror}"
        user = os.environ.get("USER") or f"user {os.getuid()}"
        return Finding(subject, False, problem, f"{other_hint}, or let {user} write to {existing}")
    if settings.lrm.on_this_host:
        return Finding(subject, True, str(path))
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    kind = file_system_type(existing.resolve(), mounts)
    if kind.removeprefix("fuse.").startswith(SHARED_FILE_SYSTEMS):
        return Finding(subject, True, f"{path} ({kind}, shared)")
    result = f"{path} ({kind}, a local disk unless it is shared with the nodes)"
    return Finding(subject, True, result, f"the nodes must see it under this path: {shared_hint}")


def file_system_type(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds a path, by the text of ``/proc/self/mountinfo``."""
    kind, longest = "unknown", -1
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        # Blanks in names are written as octal numbers.
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split(" ")[4]))
        if path.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = source.split(" ")[0], len(point.parts)
    return kind


def check_logins(settings: AgentSettings) -> list[Finding]:
    """Check whether users of this host can log in through the agent. It never fails: they may log in elsewhere."""
    hint = f"make {DIRECTORY} for the agent's account (RuntimeDirectory=koala in its unit), or set login_socket"
    problems = []
    for index, path in enumerate(settings.login_sockets):
        if problem := _login_folder_problem(path.parent):
            problems.append(problem)
            continue
        if index == 0 or settings.identity == "own":
            return [Finding("logins", True, f"users of this host log in at {path}")]
        return [Finding("logins", True, f"only this account can log in, at {path}: {'; '.join(problems)}", hint)]
    return (
        [Finding("logins", True, f"users cannot log in on this host: {'; '.join(problems)}", hint)] if problems else []
    )


def _login_folder_problem(folder: Path) -> str:
    """Return why the agent cannot make a socket in a folder; empty if it can, or if it can make the folder."""
    try:
        descriptor, owner = open_socket_folder(folder)
        os.close(descriptor)
    except FileNotFoundError:
        return "" if os.access(folder.parent, os.W_OK) else f"there is no {folder}"
    except (OSError, ValueError) as error:
        return f"{folder}: {error.strerror}" if isinstance(error, OSError) else str(error)
    if owner not in (0, os.geteuid()):
        return f"{folder} belongs to another account (uid {owner})"
    return "" if os.access(folder, os.W_OK) else f"{folder} is not writable"


async def check_daemon(settings: AgentSettings, *, own_token: bool) -> list[Finding]:
    """Check that each daemon answers, and that it accepts the agent's token. A connected agent is not disturbed."""
    return [
        finding for url in settings.urls for finding in await _check_daemon_at(url.rstrip("/"), settings, own_token)
    ]


async def _check_daemon_at(url: str, settings: AgentSettings, own_token: bool) -> list[Finding]:
    """Check the daemon at a URL. A standby daemon accepts no agents, so that its token is not checked."""
    try:
        # As the agent itself, which uses no proxy.
        verified = settings.trust.create_context()
        async with httpx2.AsyncClient(timeout=DAEMON_TIMEOUT_S, trust_env=False, verify=verified) as http:
            health = _read_object(await http.get(f"{url}/healthz"))
            if health.get("code") == ProblemCode.DAEMON_STANDBY:
                return [Finding("daemon", True, f"{url}: {health['detail']}")]
            if health.get("status") in WRONG_URL_STATUSES and "detail" in health:
                return [Finding("daemon", False, f"{url}: {health['detail']}", str(health.get("hint", "")))]
            if "version" not in health:
                hint = "give the daemon's URL with --url"
                return [Finding("daemon", False, f"the server at {url} is not a koala daemon", hint)]
            daemon = Finding("daemon", True, f"koalapy {health['version']} at {url}")
            return [daemon, await _check_token(http, url, settings, own_token=own_token)]
    except (httpx2.TransportError, httpx2.InvalidURL, OSError, ValueError) as error:
        reason, hint = str(error) or type(error).__name__, "start it with koala serve, or give its URL with --url"
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            host = ""
        cause: BaseException | None = error
        while cause is not None:
            if tls_error := explain_tls_error(cause, host):
                reason, hint = tls_error
                break
            cause = cause.__cause__ or cause.__context__
        return [Finding("daemon", False, f"no daemon answers at {url} ({reason})", hint)]


async def _check_token(http: httpx2.AsyncClient, url: str, settings: AgentSettings, *, own_token: bool) -> Finding:
    """Check that the daemon accepts the agent's token. ``own_token``: the daemon starts this agent and gives it one."""
    if not settings.token:
        if own_token:
            return Finding("agent's token", True, "the daemon starts this agent itself")
        hint = f"set it to the value of clusters.{settings.cluster}.token in the daemon's configuration"
        return Finding("agent's token", False, "KOALA_AGENT_TOKEN is not set", hint)
    headers = {"Authorization": f"Bearer {settings.token}"}
    answer = await http.get(settings.endpoint_of(url).replace("ws", "http", 1), headers=headers)
    if answer.is_success:
        return Finding("agent's token", True, f"is accepted for an agent of {settings.cluster}")
    problem = _read_object(answer)
    message = str(problem.get("detail") or f"HTTP status {answer.status_code}")
    return Finding("agent's token", False, message, str(problem.get("hint") or "see the daemon's configuration"))


def _read_object(answer: httpx2.Response) -> dict[str, object]:
    """Return the JSON object of an answer; empty if it has none."""
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


SUBJECT = "relayed links"
ANSWER_TIMEOUT_S = 10.0


async def check_relay(settings: AgentSettings, timeout_s: float = ANSWER_TIMEOUT_S) -> Finding:
    """Return whether the head can be used, by its control socket. Change nothing."""
    cluster, control = settings.cluster, settings.relay
    setting = f"clusters.{cluster}.relay"
    if control is None and settings.relayed_only:
        problem = f"clusters.{cluster}.relayed_only is set, and {setting} is not: no job can span this site and others"
        return Finding(SUBJECT, False, problem, f"start koala relay head, and set {setting} to its control socket")
    if control is None:
        hint = f"if nodes of other sites do not reach these, start koala relay head and set {setting}"
        return Finding(SUBJECT, True, "none: nodes exchange messages with those of other sites directly", hint)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _describe_head(Path(control))
    except TimeoutError:
        problem = f"the relay at {control} has not answered for {timeout_s:g} s"
        return Finding(SUBJECT, False, problem, f"restart it: systemctl restart koala-relay-head@{cluster}")
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        hint = f"start it in the agent's account: systemctl start koala-relay-head@{cluster}; or correct the path"
        return Finding(SUBJECT, False, f"there is no relay at {control}: {reason}", hint)
    return _judge_answer(cluster, answer)


async def _describe_head(control: Path) -> dict[str, Any]:
    """Return the description of itself that a head gives. Raise ``OSError`` or ``ValueError``."""
    with short_socket_path(control) as path:
        reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE)
    try:
        writer.write(b'{"t":"describe"}\n')
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise ValueError("it accepts only its own account and root")
    answer = json.loads(line)
    if not isinstance(answer, dict) or answer.get("t") != "done":
        raise ValueError(f"it gives no description: {line[:200].decode(errors='replace').strip()}")
    return answer


def _judge_answer(cluster: str, answer: dict[str, Any]) -> Finding:
    """Return the finding about a head that has answered."""
    if "hub_connected" not in answer:
        problem = "the relay at this socket is the hub, not the relay of a site"
        return Finding(
            SUBJECT, False, problem, f"set clusters.{cluster}.relay to the control socket of koala relay head"
        )
    if not answer.get("has_key", True):
        hint = "the agent gives it: start the agent, and repeat this check"
        return Finding(SUBJECT, True, "the relay waits for its key", hint)
    if not answer["hub_connected"]:
        hint = f"see why: journalctl -u koala-relay-head@{cluster}; the daemon must accept the agent's token"
        return Finding(SUBJECT, False, "the relay is not connected to the hub", hint)
    files = answer["files"]
    encryption = (
        "encrypted between sites" if answer.get("certificate") else "not encrypted: the relay has no certificate"
    )
    if files["allowed"] < files["needed"]:
        problem = f"the relay may open {files['allowed']} files, and needs {files['needed']} for its limit of streams"
        return Finding(SUBJECT, False, problem, "raise LimitNOFILE in its unit, or lower limits.streams")
    return Finding(SUBJECT, True, f"the relay is connected to the hub; streams are {encryption}")
