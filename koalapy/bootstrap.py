"""The only place where concrete adapters are chosen and put together."""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog
import uvloop

from koalapy.agents.agent import RUNNER, AgentSettings, run_agent
from koalapy.agents.lrm.local import LocalCluster, LocalLrm
from koalapy.agents.lrm.port import Lrm
from koalapy.model.errors import UsageError
from koalapy.placement.registry import Registry, builtin
from koalapy.ports import ClusterRecord, Saved
from koalapy.scheduling.grid import ClusterBook
from koalapy.settings import ClusterSection, Settings, load

if TYPE_CHECKING:
    from koalapy.agents.lrm.drmaa import DrmaaControl

PR_SET_PDEATHSIG = 1
JOBS = "koala-"
"""How the names of our jobs begin, in every resource manager."""


def configure_logging(level: int = logging.INFO) -> None:
    """One line per event, on standard error."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


# Policies


def policies() -> Registry:
    """The built-in policies and those that installed packages add under ``koalapy.policies``."""
    registry = builtin()
    for point in entry_points(group="koalapy.policies"):
        registry.register(point.load()())
    return registry


# The daemon


def serve(host: str, port: int, data_dir: Path, config: Path | None, announce: Callable[[str], None]) -> None:
    """Run a daemon until it is told to end. ``port`` 0 takes any free one; ``announce`` is called with the URL."""
    configure_logging()
    settings = load(config)
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    uvloop.run(_serve(settings, host, port, data_dir.resolve(), config, announce))


async def _serve(
    settings: Settings, host: str, port: int, data_dir: Path, config: Path | None, announce: Callable[[str], None]
) -> None:  # fmt: skip
    # Imported here, so that an agent, which also comes through this module, does not pay for them.
    from koalapy.api.agents import agents_router
    from koalapy.api.app import create_app
    from koalapy.scheduling.scheduler import Scheduler
    from koalapy.service.daemon import Daemon
    from koalapy.service.embedded import AgentProcess, EmbeddedAgents
    from koalapy.service.engine import Engine
    from koalapy.service.hub import Hub
    from koalapy.service.jobs import Jobs
    from koalapy.service.outbox import Outbox
    from koalapy.store.migrate import migrate
    from koalapy.store.sql import SqlStore, make_engine

    listener = _listen(host, port)
    database = make_engine(settings.database or f"sqlite:///{data_dir / 'koala.db'}")
    migrate(database)
    store = SqlStore(database, time.time())
    saved = store.load()
    scheduler = Scheduler(settings.rules.build(), policies(), _books(settings, saved))
    scheduler.restore(saved.jobs, time.time())
    describe = _describer(settings, scheduler.grid.__getitem__, data_dir)
    slots = {name: section.processes_per_node for name, section in settings.clusters.items()}
    outbox = Outbox(saved.outbox, store.epoch)
    engine = Engine(scheduler, store, outbox, epoch=store.epoch, slots=slots, describe=describe)
    hub = Hub(engine, store, instance=store.instance, lease=settings.lease, output_limit=settings.output_limit)
    engine.dispatcher = hub
    tokens = {name: _agent_token(section) for name, section in settings.clusters.items()}
    agents = EmbeddedAgents([
        AgentProcess(name, _agent_command(name, data_dir, config), _agent_environment(tokens[name]))
        for name, section in settings.clusters.items() if section.is_embedded
    ])  # fmt: skip
    jobs = Jobs(engine, store, saved.next_job, describe)
    app = create_app(jobs, tokens=settings.tokens, routers=[agents_router(hub, tokens)])
    try:
        await Daemon(engine, store, hub, app, listener, agents, announce).run()
    finally:
        store.close()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}", field="--port", value=port,
            hint="give another --port; 0 takes any free one",
        ) from error  # fmt: skip
    return listener


def _books(settings: Settings, saved: Saved) -> list[ClusterBook]:
    """A book for each configured cluster, with the errors it had counted before."""
    known = {record.name: record for record in saved.clusters}
    books = []
    for name, section in settings.clusters.items():
        book = ClusterBook(name, section.speed)
        before = known.get(name)
        if before is not None:
            book.total, book.errors = before.total, before.errors
            book.unusable, book.note = before.state == "unusable", before.reason
        books.append(book)
    # A cluster that left the configuration may still have jobs: it stays in the books, never to be placed on.
    gone = {c.cluster for job in saved.jobs if job.attempt for c in job.attempt.components} - settings.clusters.keys()
    return books + [ClusterBook(name) for name in sorted(gone)]


def _describer(
    settings: Settings, book_of: Callable[[str], ClusterBook], data_dir: Path
) -> Callable[[str], ClusterRecord]:  # fmt: skip
    def describe(name: str) -> ClusterRecord:
        book = book_of(name)
        section = settings.clusters.get(name, ClusterSection(kind="drmaa"))
        details: dict[str, object] = {}
        if section.kind == "local":
            details["directory"] = str(_local_directory(data_dir, name))
        return ClusterRecord(
            name=name, kind=section.kind, state=str(book.state), total=book.total, idle=book.available,
            used=book.used, background=book.background, down=book.down, errors=book.errors, reason=book.why,
            last_heard=book.last_heard, processes_per_node=section.processes_per_node, speed=section.speed,
            details=details,
        )  # fmt: skip

    return describe


# Agents


def _local_directory(data_dir: Path, cluster: str) -> Path:
    return data_dir / "clusters" / cluster / "lrm"


def _agent_token(section: ClusterSection) -> str | None:
    return section.token or (secrets.token_urlsafe(24) if section.is_embedded else None)


def _agent_command(cluster: str, data_dir: Path, config: Path | None) -> list[str]:
    command = [sys.executable, "-m", "koalapy.cli.main", "agent", cluster, "--embedded"]
    command += ["--directory", str(data_dir / "clusters" / cluster)]
    return command + (["--config", str(config)] if config else [])


def _agent_environment(token: str | None) -> dict[str, str]:
    return dict(os.environ) | {"KOALA_AGENT_TOKEN": token or ""}


def agent(
    cluster: str, url: str, config: Path | None, directory: Path, token: str, embedded: bool = False
) -> None:  # fmt: skip
    """Run the agent of a cluster until it is told to end; ``embedded``: or until the daemon that started it dies."""
    configure_logging(logging.WARNING if embedded else logging.INFO)
    os.environ.pop("KOALA_AGENT_TOKEN", None)  # programs inherit this environment, and the token is none of theirs
    if embedded:
        _die_with_parent()
    settings = load(config)
    section = settings.clusters.get(cluster)
    if section is None:
        known = ", ".join(sorted(settings.clusters))
        raise UsageError(f"there is no cluster {cluster}", field="CLUSTER", value=cluster, hint=f"there are {known}")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory = directory.resolve()
    settings_of_agent = AgentSettings(
        cluster=cluster,
        url=url,
        token=token,
        directory=directory / "spool",
        runner_host=section.runner_address or ("127.0.0.1" if section.kind == "local" else _own_address(url)),
        environment=_program_environment(cluster, section),
        modules=section.modules,
        python=section.python or sys.executable,
        lrm=section.kind,
    )
    lrm = _lrm(cluster, section, directory, settings)
    uvloop.run(_agent(settings_of_agent, lrm))
    if embedded and isinstance(lrm, LocalLrm):
        _local_cluster(cluster, section, directory, settings).stop(if_idle=True)


def _lrm(cluster: str, section: ClusterSection, directory: Path, settings: Settings) -> Lrm:
    """The adapter of a cluster's resource manager; ``SiteRejected`` when a package that it needs is missing."""
    if section.kind == "local":
        return LocalLrm(_local_cluster(cluster, section, directory, settings), JOBS)
    # Imported here: each kind needs its own, and embedded clusters none.
    from koalapy.agents.lrm.commands import words

    options = tuple(words(section.native_specification))
    if section.kind == "slurm":
        from koalapy.agents.lrm.slurm import SlurmLrm, SlurmSettings

        slurm = SlurmSettings(section.partition, section.account, options, section.poll_interval)
        return SlurmLrm(slurm, JOBS, _drmaa(section) if section.library else None)
    if section.kind == "sge":
        from koalapy.agents.lrm.sge import SgeLrm, SgeSettings

        sge = SgeSettings(section.queue, section.parallel_environment, options, section.poll_interval)
        return SgeLrm(sge, _drmaa(section), JOBS)
    from koalapy.agents.lrm.drmaa import DrmaaLrm, DrmaaSettings

    own = DrmaaSettings(
        section.nodes, section.native_specification, section.fanout or "none", section.poll_interval, directory
    )
    return DrmaaLrm(_drmaa(section), own)


def _drmaa(section: ClusterSection) -> "DrmaaControl":
    from koalapy.agents.lrm.drmaa import DrmaaControl

    return DrmaaControl(section.library)


def _local_cluster(cluster: str, section: ClusterSection, directory: Path, settings: Settings) -> LocalCluster:
    network = section.network or f"127.0.{1 + sorted(settings.clusters).index(cluster)}"
    return LocalCluster(directory / "lrm", cluster, section.nodes, network, RUNNER)


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
            f"cannot tell this host's own address: {url} leads nowhere ({error.strerror})", field="--url", value=url,
            hint="give the daemon's URL with --url, or set the cluster's runner_address",
        ) from error  # fmt: skip


async def _agent(settings: AgentSettings, lrm: Lrm) -> None:
    """Until SIGTERM or SIGINT."""
    serving = asyncio.ensure_future(run_agent(settings, lrm))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


# All nodes of an embedded cluster share this machine's name. Open MPI then takes some of its ranks for neighbours and
# others not, and collectives that need all to agree (coll/han, coll/sm) wait for ever: only the others are used.
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


def _die_with_parent() -> None:
    """Have the kernel end this process when the one that started it dies, however that happens."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(0)


__all__ = ["agent", "policies", "serve"]
