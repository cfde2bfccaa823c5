"""Start a cluster's agent: lock its directory, and prepare its settings, adapter and environment of programs."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import structlog
import uvloop

from koalapy.agent.accounts import SwitchMethod, detect_switch_method
from koalapy.agent.core.agent import run_agent
from koalapy.agent.core.handover import read_handover
from koalapy.agent.core.settings import NO_SOCKET, AgentSettings, SiteSettings
from koalapy.agent.core.spool import Spool
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.port import Finding, Lrm
from koalapy.config.logs import configure_logging, warn_of_unknown_variables, watch_out_for_crashes
from koalapy.config.settings import ClusterSection, Settings, load_settings
from koalapy.config.strict_yaml import INSTALLED_CONFIGURATIONS, installed_configuration
from koalapy.model.errors import ConflictError, UsageError
from koalapy.runner.folders import make_durable_folder
from koalapy.system.files import SOCKET_NAME as LOGIN_SOCKET
from koalapy.system.files import make_private_directory, well_known_path
from koalapy.system.process import ServiceManager, drop_own_variables, raise_file_limit
from koalapy.system.tls import SYSTEM_TRUST, Trust, check_encrypted, split_urls

log = structlog.get_logger()

PREDECESSOR_TIMEOUT = 10.0
"""Seconds that an embedded agent waits for an earlier one, which its daemon may have left running."""
MAX_OPEN_FILES = 65_536
"""Maximum open files to request: one per runner, and those of transfers and commands."""


def start_agent(
    cluster: str,
    url: str,
    config: Path | None,
    directory: Path,
    token: str,
    ca_file: Path | None,
    embedded: bool = False,
) -> None:
    """Run the agent of a cluster until it is stopped. ``url``: that of the daemon, or several with commas between.

    An ``embedded`` agent gets settings and token from the daemon that started it, and also stops when that ends.
    """
    configure_logging("warning" if embedded else "info", cluster=cluster)
    raise_file_limit(MAX_OPEN_FILES)
    if embedded:
        token, settings, trust = read_handover()
    else:
        for address in split_urls(url):
            check_encrypted(urlsplit(address))
        config = config or installed_configuration()
        settings, trust = load_settings(config), Trust(ca_file)
        trust.check_files()
    # The daemon's log needs only the warnings of its agents.
    level = "warning" if embedded and settings.log_level == "info" else settings.log_level
    configure_logging(level, settings.log_format, cluster=cluster)
    watch_out_for_crashes()
    if not embedded:
        warn_of_unknown_variables()
    manager = ServiceManager.from_environment()
    drop_own_variables()
    section = _section(cluster, settings, config)
    with suppress(OSError):  # make_private_directory reports the error
        make_durable_folder(directory)
    directory = make_private_directory(directory, ("spool", "lrm", "stages", "replicas"), "--directory")
    agent_settings = _settings_of_agent(cluster, settings, url, token, directory, *_addresses(section, url), trust)
    _check_identity(cluster, agent_settings, section)
    with lock_directory(directory, PREDECESSOR_TIMEOUT if embedded else 0.0):
        if agent_settings.replica_directories and not section.replica_directories:
            make_durable_folder(replica_directory(directory))
        lrm = make_lrm(agent_settings)
        try:
            uvloop.run(_agent(agent_settings, lrm, manager))
        finally:
            # The resource manager holds the key that verifies the files of components.
            if embedded and isinstance(lrm, LocalLrm) and not any(Spool(agent_settings.directory).load_folders()):
                lrm.cluster.stop_if_unused()


def make_lrm(settings: AgentSettings) -> Lrm:
    """Return the adapter of a cluster's resource manager. Raise ``SiteRejected`` if a package is missing."""
    make: Callable[[AgentSettings], Lrm] = import_module(f"koalapy.agent.lrm.{settings.kind}.adapter").make_lrm
    return make(settings)


def _section(cluster: str, settings: Settings, config: Path | None) -> ClusterSection:
    """Return the configuration of a cluster. Raise ``UsageError`` with the defined clusters if there is none."""
    section = settings.clusters.get(cluster)
    if section is None:
        source = config or "the built-in configuration"
        raise UsageError(
            f"there is no cluster {cluster} in {source}",
            field="CLUSTER",
            value=cluster,
            hint=f"give one of {', '.join(sorted(settings.clusters))}, or another configuration with --config",
        )
    return section


def _settings_of_agent(
    cluster: str,
    settings: Settings,
    url: str,
    token: str,
    directory: Path,
    runner_host: str,
    transfer_address: str,
    trust: Trust = SYSTEM_TRUST,
) -> AgentSettings:
    """Build the agent's settings from the cluster's configuration and the values of the command line."""
    section = settings.clusters[cluster]
    site_settings = {field.name: getattr(section, field.name) for field in fields(SiteSettings)}
    site_settings["network"] = settings.local_networks().get(cluster)
    first_url, *other_urls = split_urls(url) or [url]
    replicas = [Path(path) for path in section.replica_directories]
    has_own_replicas = section.lrm.on_this_host and section.identity != "mapped"
    return AgentSettings(
        cluster=cluster,
        login_sockets=_login_sockets(cluster, section, directory),
        url=first_url,
        other_urls=other_urls,
        token=token,
        trust=trust,
        directory=directory / "spool",
        runner_host=runner_host,
        environment=_program_environment(cluster, section),
        python=section.python or sys.executable,
        replica_directories=replicas or ([replica_directory(directory)] if has_own_replicas else []),
        stage_directory=Path(section.stage_directory) if section.stage_directory else directory / "stages",
        transfer_address=transfer_address,
        disks=settings.disks,
        **site_settings,
    )


def _login_sockets(cluster: str, section: ClusterSection, directory: Path) -> list[Path]:
    """Return the paths on which the agent may listen for users of the head node, the preferred one first."""
    if section.login_socket is not None:
        return [] if section.login_socket == NO_SOCKET else [Path(section.login_socket)]
    return [] if section.is_embedded else [well_known_path(cluster), directory / LOGIN_SOCKET]


def _check_identity(cluster: str, agent_settings: AgentSettings, section: ClusterSection) -> None:
    """Raise ``UsageError`` if the agent cannot act for several accounts, or would expose files to others."""
    section_name = f"clusters.{cluster}"
    if agent_settings.identity != "mapped":
        return
    if section.stage_directory is None:
        raise UsageError(
            f"{section_name}.identity is mapped, but {section_name}.stage_directory is not set",
            field=f"{section_name}.stage_directory",
            hint="set a folder that all accounts may enter; each gets its own folder in it",
        )
    if os.geteuid() == 0 and section.replica_directories:
        raise UsageError(
            f"{section_name}.replica_directories: an agent that runs as root would expose files to all users",
            field=f"{section_name}.replica_directories",
            hint="run the agent as an account of its own with CAP_SETUID, CAP_SETGID and CAP_KILL",
        )
    if detect_switch_method() is SwitchMethod.NONE:
        raise UsageError(
            f"{section_name}.identity is mapped, but this agent cannot act for other accounts",
            field=f"{section_name}.identity",
            hint="run it as root, or with CAP_SETUID and CAP_SETGID, or install sudo (docs/clusters.md)",
        )


def replica_directory(directory: Path) -> Path:
    """Return the default replica directory of an embedded cluster."""
    return directory / "replicas"


def _addresses(section: ClusterSection, url: str) -> tuple[str, str]:
    """Return the addresses on which nodes and other sites reach this host."""
    if section.lrm.on_this_host:
        return section.runner_address or "127.0.0.1", section.transfer_address or "127.0.0.1"
    try:
        address = _own_address(url)
    except UsageError:
        if section.runner_address is None:
            raise
        address = section.runner_address
    return section.runner_address or address, section.transfer_address or address


def _own_address(url: str) -> str:
    """Return this host's address on the route to the daemon, or the first of several. Send nothing."""
    parts = urlsplit(url.partition(",")[0])
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        family, kind, _, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(address)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"cannot determine this host's address: {url} cannot be reached ({error.strerror})",
            field="--url",
            value=url,
            hint="give the daemon's URL with --url, or set the cluster's runner_address",
        ) from error


async def _agent(settings: AgentSettings, lrm: Lrm, manager: ServiceManager) -> None:
    """Run the agent until SIGTERM or SIGINT."""
    serving = asyncio.ensure_future(run_agent(settings, lrm, manager=manager))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


# All nodes of an embedded cluster share this machine's name. Collectives that need all ranks to agree on neighbours
# (coll/han, coll/sm) hung because of that. Nodes have different addresses now; it is not proven that this helps all.
LOOPBACK_MPI = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_coll": "^han,sm"}


def _program_environment(cluster: str, section: ClusterSection) -> dict[str, str]:
    """Return the variables of a cluster's programs: the profile's, Open MPI's, and ``PATH`` with the ``bin`` folders
    first."""
    mpi = section.mpi
    environment = {
        # There are usually more ranks than cores, so waiting ranks must yield.
        **({**LOOPBACK_MPI, "OMPI_MCA_mpi_yield_when_idle": "1"} if section.lrm.on_this_host else {}),
        **section.environment,
        "KOALA_CLUSTER": cluster,
        "KOALA_MPI_SERIES": str(mpi.series),
    }
    optional = {
        "KOALA_MPI_PREFIX": mpi.prefix,
        "KOALA_MPI_INTERFACE": mpi.interface,
        "KOALA_MPI_PORTS": mpi.ports,
        "KOALA_MPI_PARAMETERS": json.dumps(mpi.parameters) if mpi.parameters else None,
        "KOALA_SCRATCH": section.scratch,
        "KOALA_CONTAINER_RUNTIME": section.container_runtime,
    }
    environment |= {name: value for name, value in optional.items() if value}
    if section.lrm.on_this_host:
        bin_folder = str(Path(sys.executable).parent)
        path = environment.get("PATH", os.environ.get("PATH", os.defpath))
        environment["PATH"] = f"{bin_folder}:{path}"
    elif mpi.prefix:
        environment["PATH"] = ":".join(filter(None, (f"{mpi.prefix}/bin", section.environment.get("PATH"))))
    return environment


def check_host(
    cluster: str,
    url: str,
    config: Path | None,
    directory: Path,
    token: str,
    ca_file: Path | None,
    user: str = "",
    installed: Sequence[str] = INSTALLED_CONFIGURATIONS,
) -> list[Finding]:
    """Return what the agent of a cluster finds on this host, in order. Raise ``UsageError`` for an invalid
    configuration.

    ``user`` is the account of the trial jobs, if jobs run as several accounts; ``installed`` are the default
    configuration files.
    """
    # Imported here, since only this function needs an HTTP client.
    from koalapy.agent.check.head_node import Expected, check_cluster

    configure_logging("critical")
    config = config or installed_configuration(installed)
    settings = load_settings(config)
    section = _section(cluster, settings, config)
    directory = directory.absolute()
    try:
        runner_host, transfer_address = _addresses(section, url)
    except UsageError:
        runner_host, transfer_address = "", section.transfer_address or ""
    for address in split_urls(url):
        check_encrypted(urlsplit(address))
    trust = Trust(ca_file)
    trust.check_files()
    agent_settings = _settings_of_agent(cluster, settings, url, token, directory, runner_host, transfer_address, trust)
    folders = {kind: path for kind, path in (("scratch", section.scratch), ("home", section.home)) if path}
    own_token = section.is_embedded and section.token is None
    expected = Expected(section.mpi.series, section.mpi.prefix, folders, own_token)
    with contextlib.ExitStack() as stack:
        lrm_settings = agent_settings
        if agent_settings.kind == "drmaa":  # the agent, which may be running, is the only writer of its table of jobs
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            lrm_settings = replace(agent_settings, directory=Path(scratch, "spool"))
        findings = asyncio.run(check_cluster(agent_settings, expected, lambda: make_lrm(lrm_settings), user=user))
    return [_configuration_finding(cluster, config, installed), *findings]


def _configuration_finding(cluster: str, config: Path | None, installed: Sequence[str]) -> Finding:
    """Report which configuration the check uses; None: the built-in one."""
    if config is not None:
        return Finding("configuration", True, str(config.absolute()))
    places = " nor ".join(installed)
    return Finding(
        "configuration",
        True,
        f"none was given, and neither {places} exists: this checks the built-in embedded cluster {cluster}",
        "give the cluster's configuration with --config or KOALA_CONFIG",
    )


RETRY_DELAY = 0.1
"""Seconds between two attempts."""


@contextmanager
def lock_directory(directory: Path, timeout: float = 0.0) -> Iterator[None]:
    """Lock a directory for this process. Raise ``ConflictError`` with the holder after ``timeout`` seconds.

    The kernel releases the lock when the process ends. It holds between hosts if the file system supports locks, as NFS
    does; otherwise nothing is locked.
    """
    file = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock_file(file, directory, time.monotonic() + timeout)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):  # the lock holds even if the disk is full
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode(), 0)
        yield
    finally:
        os.close(file)


def _lock_file(file: int, directory: Path, deadline: float) -> None:
    """Lock an open file, or log that locks are unsupported. Raise ``ConflictError`` at the deadline (monotonic)."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(RETRY_DELAY)
                continue
            raise ConflictError(
                f"{directory} is in use by another agent: {_holder(file)}",
                field="--directory",
                value=str(directory),
                hint="stop that agent, or give this one another directory with --directory",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            log.warning(
                "the file system supports no locks: make sure that only one agent uses the directory",
                action="no-locks",
                directory=str(directory),
            )
            return


def _holder(file: int) -> str:
    """Return the process that holds a lock, as text, from the content of the lock file."""
    try:
        holder = json.loads(os.pread(file, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "an agent that is starting"
