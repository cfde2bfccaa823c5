"""Start a daemon: read the configuration, build the parts, and run until a signal ends it."""

import asyncio
import gc
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import uvloop

from koalapy.config.logs import configure_logging, warn_of_unknown_variables, watch_out_for_crashes
from koalapy.config.settings import Settings, load_settings
from koalapy.config.strict_yaml import read_file
from koalapy.daemon.access import build_identities, build_logins, openid_provider, own_access, token_duties
from koalapy.daemon.agents.embedded import build_embedded_agents, make_agent_tokens
from koalapy.daemon.alerts.alerts import Check
from koalapy.daemon.alerts.daemon_checks import ConfigurationCheck
from koalapy.daemon.core import build_core, check_settings
from koalapy.daemon.engine.daemon import Daemon
from koalapy.daemon.listener.connections import FILES_WANTED, Connections
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.services import build_duties, build_services
from koalapy.daemon.web_server import ServerOptions, bind_listener, build_application, load_certificate, trust_proxies
from koalapy.policies.registry import Registry, load_policies
from koalapy.system.files import FOR_OTHERS, make_private_directory
from koalapy.system.local_token import TOKEN_FILE
from koalapy.system.process import ServiceManager, drop_own_variables, raise_file_limit

CONTENTS = ("koala.db", TOKEN_FILE, "bundles", "results", "clusters")
"""Entries by which a folder is recognized as a data directory."""
SWITCH_INTERVAL_S = 0.0005
"""After this time a busy thread, such as one that reads for a page, yields to the event loop."""


def serve(
    host: str, port: int, data_dir: Path, config: Path | None, options: ServerOptions, announce: Callable[[str], None]
) -> None:
    """Run a daemon until a signal ends it. Port 0 takes any free one; ``announce`` is called with the URL."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_logging()
    sections = {} if config is None else read_file(config)
    settings = options.apply_to(load_settings(config))
    configure_logging(settings.log_level, settings.log_format)
    watch_out_for_crashes()
    warn_of_unknown_variables()
    manager = ServiceManager.from_environment()
    drop_own_variables()
    umask = os.umask(FOR_OTHERS)
    checks = [] if config is None else [ConfigurationCheck(config.absolute(), sections, read_file)]
    is_new = is_unannounced = False

    def make_data_directory() -> Path:
        """Return the private data directory; create it if needed, and remember that it is new."""
        nonlocal is_new
        with suppress(OSError):  # make_private_directory reports the error
            data_dir.parent.mkdir(parents=True, exist_ok=True)
            data_dir.mkdir(mode=0o700)
            is_new = True
        return make_private_directory(data_dir, CONTENTS, "--data-dir")

    def collect_and_announce(url: str) -> None:
        """Announce the URL when the daemon is ready, after a last collection of garbage."""
        nonlocal is_unannounced
        # What exists now stays. A full collection of it later would delay all requests by 0.2 s.
        gc.collect()
        gc.freeze()
        is_unannounced = True
        announce(url)
        is_unannounced = False

    try:
        uvloop.run(
            run(
                settings, load_policies(), host, port, make_data_directory, umask, collect_and_announce, manager, checks
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
    more_checks: Sequence[Check] = (),
) -> None:
    """Build the parts of a daemon and run it until a signal ends it; ``umask`` is that of embedded agents.

    The data directory is made once settings and address are valid.
    """
    check_settings(settings)
    listener = bind_listener(host, port, settings)
    data_dir = make_data_directory()
    certificate = load_certificate(settings, data_dir)
    core = build_core(settings, policies, data_dir)
    engine, stores = core.engine, core.stores
    provider, audit = openid_provider(settings), Audit(stores.audit, core.clock)
    connections = Connections(raise_file_limit(FILES_WANTED))
    tokens = make_agent_tokens(settings)
    agents = build_embedded_agents(settings, tokens, data_dir, umask, engine, certificate)
    with own_access(data_dir, listener, certificate) as own_token:
        identities = build_identities(settings, stores.tokens, core.clock, provider, own_token)
        logins = build_logins(settings, identities, core.clock, audit)
        await logins.revoke_outdated()
        services = build_services(core, identities, logins, audit, certificate, more_checks)
        app = build_application(core, host, services, identities, tokens, audit, connections.max_requests)
        app = trust_proxies(app, settings, certificate)
        duties = [*build_duties(core, services, audit, certificate), *token_duties(identities, provider)]
        services.network.start()
        relaying = asyncio.create_task(core.relays.run({n: t for n, t in tokens.items() if t}, engine.queries.jobs))
        core.notifications.start()
        try:
            await services.health.check_disks()
            await engine.instruments.measure_size(stores.history.size)
            await Daemon(
                engine,
                stores.jobs,
                services.hub,
                app,
                listener,
                connections,
                agents,
                announce,
                duties,
                certificate,
                manager,
                lambda: services.health.check_readiness().status,
                audit.give_up,
            ).run()
        finally:
            relaying.cancel()
            await services.network.stop()
            await core.notifications.stop()
            await audit.end_writing()
            if core.record is not None:
                await core.record.close()
            stores.jobs.close()
