"""The daemon, with its store, its policies and the agents that it starts itself."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import uvloop

from koalapy.bootstrap.agents import replica_directory
from koalapy.bootstrap.logs import configure_logging
from koalapy.model.errors import UsageError
from koalapy.model.profile import ClusterProfile
from koalapy.placement.registry import Registry, builtin
from koalapy.ports import ClusterRecord, Saved
from koalapy.scheduling.grid import ClusterBook
from koalapy.settings import ClusterSection, Settings, load


def policies() -> Registry:
    """The built-in policies and those that installed packages add under ``koalapy.policies``."""
    registry = builtin()
    for point in entry_points(group="koalapy.policies"):
        registry.register(point.load()())
    return registry


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
    from koalapy.api.advisor import advisor_router
    from koalapy.api.agents import agents_router
    from koalapy.api.app import create_app
    from koalapy.api.background import background_router
    from koalapy.api.files import agent_files_router, files_router
    from koalapy.api.network import network_router
    from koalapy.scheduling.experience import Experience
    from koalapy.scheduling.scheduler import Scheduler
    from koalapy.service.advisor import LEARNED_FROM, Advisor
    from koalapy.service.bundles import Bundles
    from koalapy.service.catalogue import Catalogue
    from koalapy.service.daemon import Daemon
    from koalapy.service.duties import Duty
    from koalapy.service.embedded import AgentProcess, EmbeddedAgents
    from koalapy.service.engine import Engine
    from koalapy.service.feedback import TransferFeedback
    from koalapy.service.files import Files
    from koalapy.service.housekeeping import INTERVAL, Housekeeping
    from koalapy.service.hub import Hub
    from koalapy.service.jobs import Jobs
    from koalapy.service.links import LinkBook
    from koalapy.service.network import LOOK_EVERY, Measuring, Network
    from koalapy.service.outbox import Outbox
    from koalapy.service.results import Results
    from koalapy.store.advice import SqlAdvice
    from koalapy.store.measurements import SqlMeasurements
    from koalapy.store.migrate import migrate
    from koalapy.store.replicas import SqlFiles
    from koalapy.store.sql import SqlStore, make_engine

    links = settings.known_links()
    listener = _listen(host, port)
    database = make_engine(settings.database or f"sqlite:///{data_dir / 'koala.db'}")
    migrate(database)
    store = SqlStore(database, time.time())
    saved = store.load()
    measurements = SqlMeasurements(database)
    link_book = LinkBook(settings.clusters, links, measurements.latest())
    advice = SqlAdvice(database)
    experience = Experience({n: section.speed for n, section in settings.clusters.items()}, advice.runs(LEARNED_FROM))
    books = _books(settings, saved)
    scheduler = Scheduler(settings.rules.build(), policies(), books, link_book.links(), experience)
    file_store = SqlFiles(database)
    catalogue = Catalogue(file_store.replicas())
    for name in {*catalogue.names(), *(file.name for job in saved.jobs for file in job.spec.all_inputs)}:
        scheduler.grid.set_replicas(name, catalogue.sites(name))
    scheduler.restore(saved.jobs, time.time())
    describe = _describer(settings, scheduler.grid.__getitem__, data_dir)
    outbox = Outbox(saved.outbox, store.epoch)
    engine = Engine(scheduler, store, outbox, epoch=store.epoch, describe=describe, catalogue=catalogue)
    hub = Hub(engine, store, instance=store.instance, lease=settings.lease, output_limit=settings.output_limit)
    engine.dispatcher = hub
    tokens = {name: _agent_token(section) for name, section in settings.clusters.items()}
    agents = EmbeddedAgents([
        AgentProcess(name, _agent_command(name, data_dir, config), _agent_environment(tokens[name]))
        for name, section in settings.clusters.items() if section.is_embedded
    ])  # fmt: skip
    bundles = Bundles(file_store, data_dir / "bundles", limit=settings.bundle_limit, clock=engine.clock)
    files = Files(engine, file_store, hub.questions, bundles)
    jobs = Jobs(engine, store, saved.next_job, describe, files.resolve)
    results = Results(
        file_store, data_dir / "results", limit=settings.collect_limit, clock=engine.clock, attempts=jobs.attempts
    )
    housekeeping = Housekeeping(engine, bundles, results, settings.results_keep)
    network = Network(engine, jobs, measurements, link_book, Measuring(**settings.network.model_dump()))
    hub.feedback = TransferFeedback(files, network)
    duties = [Duty("tidy", INTERVAL, housekeeping.tidy), Duty("network", LOOK_EVERY, network.measure_what_is_due)]
    routers = [
        agents_router(hub, tokens), background_router(jobs, hub.questions, settings.background_load),
        files_router(files, bundles, results), agent_files_router(bundles, results, tokens),
        network_router(network), advisor_router(Advisor(experience, advice)),
    ]  # fmt: skip
    app = create_app(jobs, tokens=settings.tokens, routers=routers)
    network.start()
    try:
        await Daemon(engine, store, hub, app, listener, agents, announce, duties).run()
    finally:
        await network.stop()
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
        book = ClusterBook(name, section.speed, _profile(section))
        before = known.get(name)
        if before is not None:
            book.total, book.errors = before.total, before.errors
            book.unusable, book.note, book.trials = before.unusable, before.note, before.trials
            book.drained = before.drained
        books.append(book)
    # A cluster that left the configuration may still have jobs: it stays in the books, never to be placed on.
    gone = {c.cluster for job in saved.jobs if job.attempt for c in job.attempt.components} - settings.clusters.keys()
    return books + [ClusterBook(name) for name in sorted(gone)]


def _profile(section: ClusterSection) -> ClusterProfile:
    home = section.home or (str(Path.home()) if section.kind == "local" else None)
    return ClusterProfile(section.processes_per_node, section.scratch, home, section.paths, section.mpi.series)


def _describer(
    settings: Settings, book_of: Callable[[str], ClusterBook], data_dir: Path
) -> Callable[[str], ClusterRecord]:  # fmt: skip
    def describe(name: str) -> ClusterRecord:
        book = book_of(name)
        section = settings.clusters.get(name, ClusterSection(kind="drmaa"))
        details: dict[str, object] = {}
        if section.kind == "local":
            directory = _local_directory(data_dir, name)
            details["directory"] = str(directory)
            details["replica_directories"] = section.replica_directories or [str(replica_directory(directory.parent))]
        return ClusterRecord(
            name=name, kind=section.kind, state=str(book.state), total=book.total, idle=book.available,
            used=book.used, background=book.background, down=book.down, errors=book.errors, reason=book.why,
            last_heard=book.last_heard, processes_per_node=section.processes_per_node, speed=section.speed,
            unusable=book.unusable, note=book.note, trials=book.trials, drained=book.drained, details=details,
        )  # fmt: skip

    return describe


# Embedded agents


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
