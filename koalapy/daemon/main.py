"""The daemon, for those who start one."""

import gc
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop

from koalapy.config.logs import configure_logging, warn_of_unknown_variables, watch_out_for_crashes
from koalapy.config.settings import Settings, TlsSection, load, proxies, read_file
from koalapy.policies.installed import policies
from koalapy.system.hardening import drop_own_variables
from koalapy.system.local_token import TOKEN_FILE
from koalapy.system.private_files import FOR_OTHERS, private_directory
from koalapy.system.systemd import ServiceManager

CONTENTS = ("koala.db", TOKEN_FILE, "bundles", "results", "clusters")
"""By any of these a data directory is known."""
SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that is busy, as those are that read for pages, lets another go on: the event loop waits
so long for each of them whenever it has something to do."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What the command line says of how the daemon is reached; what is not given there is the configuration's."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: str | None = None
    """Addresses and networks, with commas between."""

    def over(self, settings: Settings) -> Settings:
        """The settings with what was given in its place; ``UsageError``."""
        tls = TlsSection(
            settings.tls.certificate if self.tls_cert is None else str(self.tls_cert.absolute()),
            settings.tls.key if self.tls_key is None else str(self.tls_key.absolute()),
        )
        behind = settings.behind_proxy if self.behind_proxy is None else proxies(self.behind_proxy.split(","))
        return settings.model_copy(update={"tls": tls, "behind_proxy": behind})


def serve(
    host: str, port: int, data_dir: Path, config: Path | None, wire: Wire, announce: Callable[[str], None]
) -> None:
    """Run a daemon until it is told to end. ``port`` 0 takes any free one; ``announce`` is called with the URL."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    configure_logging()
    started_with = {} if config is None else read_file(config)
    settings = wire.over(load(config))
    configure_logging(settings.log_level, settings.log_format)
    watch_out_for_crashes()
    warn_of_unknown_variables()
    manager = ServiceManager.of_environment()
    drop_own_variables()
    umask = os.umask(FOR_OTHERS)
    # Imported here, so that an agent, which also comes through this module, does not pay for it.
    from koalapy.daemon.alerts.checks.configuration import ConfigurationCheck
    from koalapy.daemon.assembly import run

    checks = [] if config is None else [ConfigurationCheck(config.absolute(), started_with, read_file)]
    is_new = is_untold = False

    def data_directory() -> Path:
        nonlocal is_new
        with suppress(OSError):  # which is told below, if it is one
            data_dir.parent.mkdir(parents=True, exist_ok=True)
            data_dir.mkdir(mode=0o700)
            is_new = True
        return private_directory(data_dir, CONTENTS, "--data-dir")

    def announced(url: str) -> None:
        nonlocal is_untold
        # What is there now stays: a full collection of it would keep all requests waiting for a sixth of a second.
        gc.collect()
        gc.freeze()
        is_untold = True
        announce(url)
        is_untold = False

    try:
        uvloop.run(run(settings, policies(), host, port, data_directory, umask, announced, manager, checks))
    finally:
        # The lease was ours: no other daemon has served from it. Of a database elsewhere there may be moved output.
        if is_new and is_untold and not settings.database:
            shutil.rmtree(data_dir, ignore_errors=True)
