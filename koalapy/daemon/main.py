"""Start a daemon: read the configuration, build the parts, and run until a signal ends it."""

import asyncio
import gc
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import uvloop

from koalapy import __version__
from koalapy.config.logs import configure_logging, warn_of_unknown_variables, watch_out_for_crashes
from koalapy.config.settings import Settings, load_settings
from koalapy.daemon.access import own_access
from koalapy.daemon.agents.embedded import EmbeddedAgents, build_embedded_agents
from koalapy.daemon.agents.hub import Hub
from koalapy.daemon.backup import check_restored
from koalapy.daemon.core import Core, check_settings
from koalapy.daemon.engine.database import Threads, query
from koalapy.daemon.engine.duties import Duties, Duty
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.engine.watchdog import Watchdog
from koalapy.daemon.listener.certificate import Certificate
from koalapy.daemon.listener.connections import FILES_WANTED, SHUTDOWN_GRACE, Connections, HttpServer
from koalapy.daemon.services import Services
from koalapy.daemon.standby import Standby, check_database, own_url, set_on_signals, url_of
from koalapy.daemon.web_server import ServerOptions, bind_listener, build_application, load_certificate, trust_proxies
from koalapy.model.errors import ConflictError, LeaseLost, StoreUnavailable
from koalapy.policies.registry import Registry, load_policies
from koalapy.runner.folders import make_durable_folder
from koalapy.store.database import Claim
from koalapy.store.sql import JobStore
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.files import FOR_OTHERS, make_private_directory
from koalapy.system.local_token import TOKEN_FILE
from koalapy.system.process import ServiceManager, drop_own_variables, raise_file_limit

log = structlog.get_logger()

CONTENTS = ("koala.db", TOKEN_FILE, "bundles", "results", "clusters")
"""Entries by which a folder is recognized as a data directory."""
RETRY_S = 1.0
"""Pause before a daemon stands by again, after the database failed while it took over."""
SWITCH_INTERVAL_S = 0.0005
"""After this time a busy thread, such as one that reads for a page, yields to the event loop."""


def serve(
    host: str, port: int, data_dir: Path, config: Path | None, options: ServerOptions, announce: Callable[..., None]
) -> None:
    """Run a daemon until a signal ends it. Port 0 takes any free one.

    ``announce`` is called with the URL, and for a daemon that stands by also with the active one.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_logging()
    settings = options.apply_to(load_settings(config))
    configure_logging(settings.log_level, settings.log_format)
    watch_out_for_crashes()
    warn_of_unknown_variables()
    manager = ServiceManager.from_environment()
    drop_own_variables()
    umask = os.umask(FOR_OTHERS)
    is_new = is_unannounced = False

    def make_data_directory() -> Path:
        """Return the private data directory; create it if needed, and remember that it is new."""
        nonlocal is_new
        with suppress(OSError):  # make_private_directory reports the error
            existed = data_dir.exists()
            make_durable_folder(data_dir)
            is_new = not existed
        directory = make_private_directory(data_dir, CONTENTS, "--data-dir")
        check_restored(directory)
        return directory

    def collect_and_announce(url: str, *active: str) -> None:
        """Announce the URL when the daemon is ready or stands by, after a last collection of garbage."""
        nonlocal is_unannounced
        # What exists now stays. A full collection of it later would delay all requests by 0.2 s.
        gc.collect()
        gc.freeze()
        is_unannounced = True
        announce(url, *active)
        is_unannounced = False

    try:
        uvloop.run(
            run(
                settings,
                load_policies(),
                host,
                port,
                make_data_directory,
                umask,
                collect_and_announce,
                manager,
                collect_and_announce if options.standby else None,
            )
        )
    finally:
        # No other daemon has used the directory, since this one held the lease.
        if is_new and is_unannounced and not settings.database:
            shutil.rmtree(data_dir, ignore_errors=True)


async def run(
    settings: Settings,
    policies: Registry,
    host: str,
    port: int,
    make_data_directory: Callable[[], Path],
    umask: int,
    announce: Callable[[str], None],
    manager: ServiceManager,
    announce_standby: Callable[[str, str], None] | None = None,
    machine: Clock = SYSTEM_CLOCK,
) -> None:
    """Build the parts of a daemon and run it until a signal ends it; ``umask`` is that of embedded agents.

    The data directory is made once settings and address are valid. With ``announce_standby``, which is called with the
    URL and the active daemon, stand by while another daemon holds the lease.
    """
    check_settings(settings)
    if announce_standby is not None:
        check_database(settings)
    listener = bind_listener(host, port, settings)
    data_dir = make_data_directory()
    certificate = load_certificate(settings, data_dir)
    signalled = asyncio.Event()

    async def serve_until_end(own_token: str, listener: socket.socket, claim: Claim) -> bool:
        """Take the lease and serve until the daemon ends. Return whether it ends because it has lost the lease.

        Raise ``ConflictError`` if another daemon has the lease.
        """
        core = Core(settings, policies, data_dir, claim, machine)
        async with AsyncExitStack() as ending:  # the last part started ends first
            ending.callback(core.stores.jobs.close)
            if core.record is not None:
                ending.push_async_callback(core.record.close)
            ending.push_async_callback(core.audit.end_writing)
            connections = Connections(raise_file_limit(FILES_WANTED))
            services = Services(core, own_token, certificate)
            await services.logins.revoke_outdated()
            app = build_application(core, services, host, connections.max_requests)
            daemon = Daemon(
                core.engine,
                core.stores.jobs,
                services.hub,
                trust_proxies(app, settings, certificate),
                listener,
                connections,
                build_embedded_agents(settings, services.agent_tokens, data_dir, umask, core.engine, certificate),
                announce,
                signalled,
                services.list_duties(),
                certificate,
                manager,
                lambda: services.health.check_readiness().status,
                core.audit.give_up,
            )
            services.network.start()
            agent_tokens = {name: token for name, token in services.agent_tokens.items() if token}
            relaying = asyncio.create_task(core.relays.run(agent_tokens, core.queries.jobs))
            core.notifications.start()
            ending.push_async_callback(core.notifications.stop)
            ending.push_async_callback(services.network.stop)
            ending.callback(relaying.cancel)
            await services.health.check_disks()
            await core.engine.instruments.measure_size(core.stores.history.size)
            await daemon.run()
        return core.engine.database.lease_lost

    with own_access(data_dir, listener, certificate) as own_token:
        if announce_standby is None:
            await serve_until_end(own_token, listener, Claim(own_url(settings, listener, certificate)))
            return
        is_replaced, threads = True, Threads(1, "lease")
        while is_replaced:
            standby = Standby(
                settings,
                policies,
                host,
                data_dir,
                certificate,
                own_token,
                manager,
                threads,
                announce_standby,
                signalled,
            )
            if (claim := await standby.run(listener)) is None:
                return
            try:
                is_replaced = await serve_until_end(own_token, listener.dup(), claim)
            except (ConflictError, LeaseLost) as error:
                log.warning("another daemon has the lease: this one stands by", action="stands-by", reason=str(error))
            except StoreUnavailable as error:
                log.error("the database is unavailable", action="database-away", error=error.message)
                await asyncio.sleep(RETRY_S)


@dataclass
class Daemon:
    """The tasks of ``koala serve``."""

    engine: Engine
    store: JobStore
    hub: Hub
    app: Any
    listener: socket.socket
    connections: Connections
    agents: EmbeddedAgents
    announce: Callable[[str], None]
    signalled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGTERM and SIGINT; may be set before ``run``, while this process stood by or took over."""
    duties: Sequence[Duty] = ()
    certificate: Certificate | None = None
    manager: ServiceManager = field(default_factory=ServiceManager)
    status: Callable[[], str] = str
    """Returns the line that the service manager shows."""
    give_up: Callable[[], None] = lambda: None
    """Called last before the process exits without a clean stop."""

    def __post_init__(self) -> None:
        self._lease_lost = asyncio.Event()
        self._watchdog = Watchdog(self.manager, self.status)
        self._server = HttpServer(self.app, self.connections, self._announce_start, self.certificate)
        self._duties = Duties(self.engine, self.store, self._lease_lost.set, self.duties)

    def _announce_start(self) -> None:
        """Start what needs the daemon's address: embedded agents, service manager and watchdog."""
        url = url_of(self.listener, self.certificate)
        self.announce(url)
        self.agents.start(url)
        log.info("the daemon serves", action="daemon-serves", url=url, version=__version__, epoch=self.engine.epoch)
        self.manager.notify_ready(f"serves {url}")
        self._watchdog.start()

    async def run(self) -> None:
        """Run until SIGTERM, SIGINT, the loss of the database's lease, or the unexpected end of engine or server."""
        set_on_signals(self.signalled)
        engine = asyncio.create_task(self.engine.run(), name="engine")
        server = asyncio.create_task(self._server.serve([self.listener]), name="server")
        ends = [asyncio.create_task(event.wait(), name="end") for event in (self.signalled, self._lease_lost)]
        self._duties.start()
        try:
            await asyncio.wait({engine, server, *ends}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await self._shut_down(engine, server)

    async def _shut_down(self, engine: "asyncio.Task[None]", server: "asyncio.Task[None]") -> None:
        """End connections, requests, agents and engine in this order, then release the lease on the database.

        If the database does not answer, exit the process with code 1 instead.
        """
        log.info("the daemon ends", action="daemon-ends")
        self.manager.notify_stopping()
        self._watchdog.stop()
        self._duties.stop()
        self.engine.drain()
        await self.hub.close()
        self._server.should_exit = True
        await asyncio.wait({server}, timeout=SHUTDOWN_GRACE * 2)
        await self.agents.stop()
        self.engine.stop()
        try:
            await engine
            await query(self.store.release_lease)
        except StoreUnavailable as error:
            log.critical(
                "the daemon exits without a clean stop: the database does not answer",
                action="daemon-ends",
                error=error.message,
            )
            self.give_up()
            sys.stderr.flush()
            os._exit(1)  # threads that wait for the database would delay a normal exit
        await server
