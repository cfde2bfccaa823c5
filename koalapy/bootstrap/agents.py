"""The agent of one cluster, with the adapter of its resource manager and the environment of its programs."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvloop

from koalapy.agents.agent import RUNNER, AgentSettings, run_agent
from koalapy.agents.hold import held
from koalapy.agents.lrm.local.adapter import LocalLrm
from koalapy.agents.lrm.local.cluster import LocalCluster
from koalapy.agents.lrm.port import Finding, Lrm
from koalapy.bootstrap.handover import take_handover
from koalapy.bootstrap.logs import configure_logging
from koalapy.concealment import forget_own
from koalapy.model.errors import UsageError
from koalapy.open_files import raise_limit
from koalapy.private import private_directory
from koalapy.settings import ClusterSection, Settings, load

if TYPE_CHECKING:
    from koalapy.agents.lrm.drmaa.control import DrmaaControl

PREDECESSOR_ENDS_WITHIN = 10.0
"""Seconds that an embedded agent waits for the one before it, which its own daemon may have left behind."""
FILES = 65_536
"""Open files that an agent asks for: one for each runner, and what transfers and commands need."""
JOBS = "koala-"
"""How the names of our jobs begin, in every resource manager."""


def agent(cluster: str, url: str, config: Path | None, directory: Path, token: str, embedded: bool = False) -> None:
    """Run the agent of a cluster until it is told to end.

    ``embedded``: or until the daemon dies that started it, and hands over its settings and token.
    """
    configure_logging(logging.WARNING if embedded else logging.INFO)
    raise_limit(FILES)
    if embedded:
        token, settings = take_handover()
    else:
        settings = load(config)
    forget_own()
    section = _section(cluster, settings)
    directory = private_directory(directory, ("spool", "lrm", "stages", "replicas"), "--directory")
    runner_host, transfer_address = _addresses(section, url)
    settings_of_agent = replace(
        _settings_of_agent(cluster, section, url, token, directory, runner_host, transfer_address),
        disks=settings.disks.build(),
    )
    with held(directory, PREDECESSOR_ENDS_WITHIN if embedded else 0.0):
        if section.kind == "local" and not section.replica_directories:
            replica_directory(directory).mkdir(exist_ok=True)
        lrm = _lrm(cluster, section, directory, settings)
        try:
            uvloop.run(_agent(settings_of_agent, lrm))
        finally:
            if embedded and isinstance(lrm, LocalLrm):
                _local_cluster(cluster, section, directory, settings).stop(if_idle=True)


def _lrm(cluster: str, section: ClusterSection, directory: Path, settings: Settings) -> Lrm:
    """The adapter of a cluster's resource manager; ``SiteRejected`` when a package that it needs is missing."""
    if section.kind == "local":
        return LocalLrm(_local_cluster(cluster, section, directory, settings), JOBS, section.start_failures)
    # Imported here: each kind needs its own, and embedded clusters none.
    from koalapy.agents.lrm.commands import words

    options = tuple(words(section.native_specification))
    if section.kind == "slurm":
        from koalapy.agents.lrm.slurm.adapter import SlurmLrm, SlurmSettings

        slurm = SlurmSettings(section.partition, section.account, options, section.poll_interval)
        return SlurmLrm(slurm, JOBS, _drmaa(section) if section.library else None)
    if section.kind == "sge":
        from koalapy.agents.lrm.sge.adapter import SgeLrm, SgeSettings

        sge = SgeSettings(section.queue, section.parallel_environment, options, section.poll_interval)
        return SgeLrm(sge, _drmaa(section), JOBS)
    from koalapy.agents.lrm.drmaa.adapter import DrmaaLrm, DrmaaSettings

    own = DrmaaSettings(
        section.nodes, section.native_specification, section.fanout or "none", section.poll_interval, directory
    )
    return DrmaaLrm(_drmaa(section), own)


def _drmaa(section: ClusterSection) -> "DrmaaControl":
    from koalapy.agents.lrm.drmaa.control import DrmaaControl

    return DrmaaControl(section.library)


def _local_cluster(cluster: str, section: ClusterSection, directory: Path, settings: Settings) -> LocalCluster:
    network = section.network or f"127.0.{1 + sorted(settings.clusters).index(cluster)}"
    return LocalCluster(directory / "lrm", cluster, section.nodes, network, RUNNER)


def _section(cluster: str, settings: Settings) -> ClusterSection:
    section = settings.clusters.get(cluster)
    if section is None:
        known = ", ".join(sorted(settings.clusters))
        raise UsageError(f"there is no cluster {cluster}", field="CLUSTER", value=cluster, hint=f"there are {known}")
    return section


def _settings_of_agent(
    cluster: str,
    section: ClusterSection,
    url: str,
    token: str,
    directory: Path,
    runner_host: str,
    transfer_address: str,
) -> AgentSettings:
    replica_directories = section.replica_directories
    if section.kind == "local" and not replica_directories:
        replica_directories = [str(replica_directory(directory))]
    return AgentSettings(
        cluster=cluster,
        url=url,
        token=token,
        directory=directory / "spool",
        runner_host=runner_host,
        environment=_program_environment(cluster, section),
        modules=section.modules,
        python=section.python or sys.executable,
        lrm=section.kind,
        poll_interval=section.poll_interval,
        replica_directories=[Path(path) for path in replica_directories],
        stage_directory=Path(section.stage_directory) if section.stage_directory else directory / "stages",
        transfer_address=transfer_address,
        transfer_port=section.transfer_port,
        transfer_limit=section.transfer_limit,
        forget_after=section.forget_after,
    )


def replica_directory(directory: Path) -> Path:
    """Where replicas of an embedded cluster lie that is told of no other place."""
    return directory / "replicas"


def _addresses(section: ClusterSection, url: str) -> tuple[str, str]:
    """Where the nodes reach this host, and where other sites do."""
    if section.kind == "local":
        return section.runner_address or "127.0.0.1", section.transfer_address or "127.0.0.1"
    try:
        own = _own_address(url)
    except UsageError:
        if section.runner_address is None:
            raise
        own = section.runner_address
    return section.runner_address or own, section.transfer_address or own


def _own_address(url: str) -> str:
    """This host's address on the way to the daemon; nothing is sent."""
    there = urlsplit(url)
    try:
        family, kind, _, _, address = socket.getaddrinfo(there.hostname, there.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(address)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"cannot tell this host's own address: {url} leads nowhere ({error.strerror})",
            field="--url",
            value=url,
            hint="give the daemon's URL with --url, or set the cluster's runner_address",
        ) from error


async def _agent(settings: AgentSettings, lrm: Lrm) -> None:
    """Until SIGTERM or SIGINT."""
    serving = asyncio.ensure_future(run_agent(settings, lrm))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


# All nodes of an embedded cluster share this machine's name, and collectives that need all ranks to agree on who is
# whose neighbour (coll/han, coll/sm) waited for ever. Nodes are told apart now; that cures it for all of them is not
# proven.
LOOPBACK_MPI = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_coll": "^han,sm"}


def _program_environment(cluster: str, section: ClusterSection) -> dict[str, str]:
    """What programs of a cluster find: the profile's own, ``bin`` folders first on ``PATH``, and how MPI is set."""
    mpi = section.mpi
    environment = {
        # More ranks than cores are the rule here: a rank that waits gives its core away.
        **({**LOOPBACK_MPI, "OMPI_MCA_mpi_yield_when_idle": "1"} if section.kind == "local" else {}),
        **section.environment,
        "KOALA_CLUSTER": cluster,
        "KOALA_MPI_SERIES": str(mpi.series),
    }
    given = {
        "KOALA_MPI_PREFIX": mpi.prefix,
        "KOALA_MPI_INTERFACE": mpi.interface,
        "KOALA_MPI_PORTS": mpi.ports,
        "KOALA_MPI_PARAMETERS": json.dumps(mpi.parameters) if mpi.parameters else None,
        "KOALA_SCRATCH": section.scratch,
    }
    environment |= {name: value for name, value in given.items() if value}
    if section.kind == "local":
        own = str(Path(sys.executable).parent)
        rest = environment.get("PATH", os.environ.get("PATH", os.defpath))
        environment["PATH"] = f"{own}:{rest}"
    elif mpi.prefix:
        environment["PATH"] = ":".join(filter(None, (f"{mpi.prefix}/bin", section.environment.get("PATH"))))
    return environment


def check(cluster: str, url: str, config: Path | None, directory: Path, token: str) -> list[Finding]:
    """What the agent of a cluster would find here, in order; a wrong configuration is a ``UsageError``."""
    # Imported here: nobody else needs an HTTP client.
    from koalapy.agents.check import Expected, check_cluster

    configure_logging(logging.CRITICAL)
    settings = load(config)
    section = _section(cluster, settings)
    directory = directory.absolute()
    try:
        runner_host, transfer_address = _addresses(section, url)
    except UsageError:
        runner_host, transfer_address = "", section.transfer_address or ""
    would_be = _settings_of_agent(cluster, section, url, token, directory, runner_host, transfer_address)
    folders = {what: path for what, path in (("scratch", section.scratch), ("home", section.home)) if path}
    own_token = section.is_embedded and section.token is None
    expected = Expected(section.mpi.series, section.mpi.prefix, folders, own_token)
    return asyncio.run(check_cluster(would_be, expected, lambda: _lrm(cluster, section, directory, settings)))
