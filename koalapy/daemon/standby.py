"""A standby daemon: it answers reads from the database until the active daemon's lease may be taken."""

import asyncio
import gc
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from fastapi import FastAPI

from koalapy.api.app import create_app
from koalapy.api.guard import AllowedHosts
from koalapy.api.standby import StandbyGate
from koalapy.config.settings import Settings
from koalapy.daemon.access import build_identities, load_provider
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.core import Core
from koalapy.daemon.engine.database import Threads
from koalapy.daemon.engine.duties import Duty, repeat_duty
from koalapy.daemon.engine.watchdog import Watchdog
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.output import Outputs
from koalapy.daemon.listener.certificate import LOOK_INTERVAL, Certificate
from koalapy.daemon.listener.connections import FILES_WANTED, Connections, HttpServer
from koalapy.daemon.services import KEYS_INTERVAL
from koalapy.daemon.web_server import trust_proxies
from koalapy.model.errors import StoreUnavailable, UsageError, reject
from koalapy.policies.registry import Registry
from koalapy.store.database import Claim
from koalapy.store.job_numbers import recorded_commit
from koalapy.store.records import ClusterRecord
from koalapy.store.standby import NO_LEASE, LeaseReader, LeaseState, LeaseWatch
from koalapy.system.process import ServiceManager, raise_file_limit

if TYPE_CHECKING:
    from koalapy.daemon.auth.oidc import Oidc

log = structlog.get_logger()

POLL_INTERVAL_S = 0.25
"""Pause between two reads of the lease."""
TOKENS_INTERVAL_S = 5.0
"""Time for which a token that was revoked at the active daemon may be accepted here."""
MAX_FOREIGN_READS = 20
"""Reads of the lease in which a shared file system may lack what the active daemon has just written."""
SERVER_END_S = 1.0
"""Time that requests have to end before this daemon becomes active."""


def check_database(settings: Settings) -> None:
    """Raise ``UsageError`` if two machines cannot share the database."""
    url = settings.database or "sqlite:"
    if not url.startswith("postgres"):
        problem = "needs PostgreSQL: SQLite is a file of one machine, which ends with it"
        hint = "set database: postgresql://USER@HOST/NAME for both daemons, or leave --standby out"
        reject("--standby", url.partition(":")[0], problem, hint)


def set_on_signals(event: asyncio.Event) -> None:
    """Set an event on SIGTERM and SIGINT, from now on and in place of what they did before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)


def url_of(listener: socket.socket, certificate: Certificate | None, name: str = "") -> str:
    """Return the URL of a listening socket, with another ``name`` of the host if one is given."""
    host, port = listener.getsockname()[:2]
    host = name or (f"[{host}]" if ":" in host else host)
    return f"{'http' if certificate is None else 'https'}://{host}:{port}"


def own_url(settings: Settings, listener: socket.socket, certificate: Certificate | None) -> str:
    """Return the URL at which clients on other machines reach this daemon."""
    is_wildcard = listener.getsockname()[0] in ("0.0.0.0", "::")
    return settings.public_url or url_of(listener, certificate, socket.getfqdn() if is_wildcard else "")


@dataclass
class Standby:
    """The tasks of a daemon that stands by."""

    settings: Settings
    policies: Registry
    host: str
    data_dir: Path
    certificate: Certificate | None
    own_token: str
    manager: ServiceManager
    threads: Threads
    """The thread that reads the lease."""
    announce: Callable[[str, str], None]
    """Called with the URL of this daemon, and host or URL of the active one."""
    signalled: asyncio.Event
    """Set by SIGTERM and SIGINT, also after ``run`` has returned."""
    state: LeaseState = NO_LEASE
    _foreign_reads: int = 0
    """How often the data directory lacked a commit of the active daemon."""
    _core: Core | None = None
    _identities: Identities | None = None
    _app: FastAPI | None = None
    _problem: str = ""
    """Why the database cannot be read."""
    _tokens_loaded_at: float = field(default_factory=time.monotonic)

    async def run(self, listener: socket.socket) -> Claim | None:
        """Stand by until the lease may be taken, and return how; None if a signal ends this daemon."""
        assert self.settings.database is not None
        gc.unfreeze()  # objects of an earlier active daemon of this process
        address = own_url(self.settings, listener, self.certificate)
        if address.partition("://")[2].startswith(("localhost", "127.", "[::1]")):
            log.warning("give --host or set public_url: the address is local", action="local-address", url=address)
        loop = asyncio.get_running_loop()
        set_on_signals(self.signalled)
        ending, provider = asyncio.create_task(self.signalled.wait()), load_provider(self.settings)
        duties = [asyncio.create_task(repeat_duty(duty), name=duty.name) for duty in self._list_duties(provider)]
        reader, watch = LeaseReader(self.settings.database), LeaseWatch()
        server: HttpServer | None = None
        serving: asyncio.Task[None] | None = None
        watchdog = Watchdog(self.manager, lambda: f"stands by; {self._active} is active")
        try:
            while not self.signalled.is_set():
                try:
                    reading = loop.run_in_executor(self.threads, reader.read)
                    either: set[asyncio.Future[Any]] = {reading, ending}
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if self.signalled.is_set():  # also while the database does not answer
                        return None
                    state = await reading
                    if reason := watch.find_reason(state, time.monotonic()):
                        previous = {"active": self._active, "epoch": state.epoch}
                        log.warning("this daemon takes over", action="takes-over", reason=reason, **previous)
                        return Claim(address, None if state.is_released else state.expires_at)
                    self._read_database(state, provider)
                except StoreUnavailable as error:
                    watch.forget()
                    self._note_problem(error.message)
                else:
                    self._note_problem("")
                if server is None and self.state is not NO_LEASE:
                    server = self._make_server(listener, watchdog)
                    serving = asyncio.create_task(server.serve([listener.dup()]), name="standby")
                await asyncio.wait({ending}, timeout=POLL_INTERVAL_S)
            return None
        finally:
            for task in (ending, *duties):
                task.cancel()
            watchdog.stop()
            if server is not None and serving is not None:
                server.should_exit = True
                await asyncio.wait({serving}, timeout=SERVER_END_S)
            if self._core is not None:
                self._core.stores.jobs.close()
            self.threads.submit(reader.close)

    @property
    def _active(self) -> str:
        return self.state.address or self.state.holder

    def _make_server(self, listener: socket.socket, watchdog: Watchdog) -> HttpServer:
        """Return the server of this daemon, which announces it once it listens."""
        url = url_of(listener, self.certificate)

        def announce_start() -> None:
            self.announce(url, self._active)
            log.info("the daemon stands by", action="stands-by", url=url, active=self._active, epoch=self.state.epoch)
            self.manager.notify_ready(f"stands by at {url}")
            watchdog.start()

        gate = StandbyGate(lambda: self._app, lambda: (self.state.holder, self.state.address))
        app = trust_proxies(gate, self.settings, self.certificate)
        return HttpServer(app, Connections(raise_file_limit(FILES_WANTED)), announce_start, self.certificate)

    def _check_data(self, state: LeaseState) -> None:
        """Raise ``UsageError`` if this daemon cannot continue from the files of the active one."""
        if state.epoch == self.state.epoch and (state.batch > 0) is (self.state.batch > 0):
            return
        embedded = sorted(name for name, section in self.settings.clusters.items() if section.is_embedded)
        host = state.holder.rpartition(":")[0]
        if embedded and host != socket.gethostname():
            raise UsageError(
                f"clusters.{embedded[0]} is embedded: its nodes are processes on {host}, where the active daemon runs",
                field="clusters",
                value=embedded[0],
                hint="run its agent by itself (koala agent), or let the standby daemon run on the same machine",
            )
        if state.batch > 0 and recorded_commit(self.data_dir)[0] < state.epoch:
            self._foreign_reads += 1
            if self._app is not None or self._foreign_reads < MAX_FOREIGN_READS:
                raise StoreUnavailable(f"{self.data_dir} does not have the last commit of {state.holder} yet")
            problem = f"is {self.data_dir}, which is not the data directory of the active daemon ({state.holder})"
            hint = "share its data directory with this machine, as by NFS: it has the output and files of all jobs"
            reject("--data-dir", str(self.data_dir), problem, hint)

    def _note_problem(self, problem: str) -> None:
        """Log when the database becomes unavailable or available."""
        if problem and not self._problem:
            log.error("the database is unavailable", action="database-away", error=problem)
        elif self._problem and not problem:
            log.info("the database is available again", action="database-back")
        self._problem = problem

    def _list_duties(self, provider: "Oidc | None") -> Iterator[Duty]:
        """Yield the periodic work of a daemon that answers reads, by which withdrawn keys end."""
        if provider is not None:
            yield Duty("keys of the provider", KEYS_INTERVAL, provider.keys.refresh_keys)
        if (certificate := self.certificate) is not None:
            yield Duty("certificate", LOOK_INTERVAL, partial(asyncio.to_thread, certificate.reload_if_changed))

    def _read_database(self, state: LeaseState, provider: "Oidc | None") -> None:
        """Check the state of the lease, and build the application that reads, or refresh its tokens.

        The application is built once the database has the tables of this version.
        """
        self._check_data(state)
        self.state = state
        if not state.has_schema:
            return
        if self._app is None:
            self._core = core = Core(self.settings, self.policies, self.data_dir, claim=None)
            self._identities = build_identities(self.settings, core.stores.tokens, core.clock, provider, self.own_token)
            outputs = Outputs(core.engine, core.queries, core.stores.jobs, core.stores.output)
            jobs = Jobs(core.engine, core.queries, core.stores.jobs, outputs, 1, self._describe_cluster)
            health = HealthMonitor(core.engine, core.queries, {}, self.settings.disks)
            hosts = AllowedHosts([self.host, *self.settings.allowed_hosts])
            self._app = create_app(jobs, health, self._identities, hosts=hosts)
        elif self._core and self._identities and time.monotonic() - self._tokens_loaded_at >= TOKENS_INTERVAL_S:
            self._tokens_loaded_at = time.monotonic()
            self._identities.load_tokens(self._core.stores.tokens.tokens())

    def _describe_cluster(self, name: str) -> ClusterRecord:
        """Return the state of a cluster that the active daemon has stored last."""
        assert self._core is not None
        stored = next((record for record in self.state.clusters if record.name == name), None)
        if stored is None:
            return self._core.describe(name)
        return replace(stored, reason=stored.reason or "the active daemon knows how many nodes are idle and used")
