"""The daemon, for those who start one."""

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import uvloop

from koalapy.bootstrap.logs import configure_logging
from koalapy.concealment import forget_own
from koalapy.credentials import TOKEN_FILE
from koalapy.placement.registry import Registry, builtin
from koalapy.private import FOR_OTHERS, private_directory
from koalapy.settings import load

CONTENTS = ("koala.db", TOKEN_FILE, "bundles", "results", "clusters")
"""By any of these a data directory is known."""


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
    forget_own()
    umask = os.umask(FOR_OTHERS)
    # Imported here, so that an agent, which also comes through this module, does not pay for it.
    from koalapy.bootstrap.assembly import run

    def data_directory() -> Path:
        return private_directory(data_dir, CONTENTS, "--data-dir")

    uvloop.run(run(settings, policies(), host, port, data_directory, umask, announce))
