"""Hands settings and token to embedded agents by a pipe, and its end signals that the daemon is gone."""

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from koalapy.config.settings import Settings
from koalapy.system.tls import Trust

EXIT_TIMEOUT = 10.0
"""Seconds that an agent has to exit in good order after its daemon is gone."""
STDIN = 0
SHARED_SETTINGS = ("log_level", "log_format")
"""Settings that an agent receives besides the clusters."""


def write_handover(cluster: str, settings: Settings, token: str, umask: int, certificate: Path | None = None) -> bytes:
    """Return what the agent of a cluster needs: its section, the names of the other clusters, its token, and the
    daemon's certificate."""
    section = settings.model_dump(mode="json", include={"clusters": {cluster}})["clusters"][cluster]
    del section["token"]
    # It depends on the networks of all clusters, which the agent does not receive.
    section["network"] = settings.local_networks().get(cluster)
    clusters: dict[str, Any] = {name: {} for name in settings.clusters} | {cluster: section}
    handover = {"token": token, "umask": umask, "certificate": None if certificate is None else str(certificate)}
    handover |= settings.model_dump(mode="json", include=set(SHARED_SETTINGS)) | {"clusters": clusters}
    return json.dumps(handover).encode() + b"\n"


def read_handover() -> tuple[str, Settings, Trust]:
    """Return token, settings and the daemon's trust anchor from standard input; exit if the daemon is gone.

    From now on this process ends when the daemon does, since only the daemon holds the other end of the pipe.
    """
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(STDIN, 1 << 16)
        if not piece:
            raise SystemExit(0)
        line += piece
    # Child processes must not inherit the pipe.
    pipe = os.dup(STDIN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    threading.Thread(target=_end_with, args=(pipe,), name="handover", daemon=True).start()
    handover = json.loads(line)
    os.umask(handover["umask"])
    certificate = handover["certificate"]
    trust = Trust(pinned=None if certificate is None else Path(certificate))
    return handover["token"], Settings(**{name: handover[name] for name in ("clusters", *SHARED_SETTINGS)}), trust


def _end_with(pipe: int) -> None:
    """Wait for the end of a pipe or socket, then end this process."""
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_TIMEOUT)
    os._exit(1)
