"""What the daemon tells the agents that it starts: by a pipe that nobody else can read, and whose end is its own."""

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
"""Seconds that an agent has to end in good order when its daemon is gone."""
STDIN = 0
SHARED_SETTINGS = ("links", "encrypt_transfers", "log_level", "log_format")
"""What of the configuration an agent is told beside clusters."""


def write_handover(cluster: str, settings: Settings, token: str, umask: int, certificate: Path | None = None) -> bytes:
    """What the agent of a cluster needs: its own section, of the other clusters the names, and by which certificate it
    knows the daemon."""
    own = settings.model_dump(mode="json", include={"clusters": {cluster}})["clusters"][cluster]
    del own["token"]
    own["network"] = settings.local_networks().get(cluster)  # by the networks of all clusters, which it is not told
    clusters: dict[str, Any] = {name: {} for name in settings.clusters} | {cluster: own}
    told = {"token": token, "umask": umask, "certificate": None if certificate is None else str(certificate)}
    told |= settings.model_dump(mode="json", include=set(SHARED_SETTINGS)) | {"clusters": clusters}
    return json.dumps(told).encode() + b"\n"


def read_handover() -> tuple[str, Settings, Trust]:
    """What the daemon hands over: token, settings, and by what it is known; ends this process when it has gone.

    From now on this process ends when the daemon does, however that happens: nobody else holds the pipe's other end.
    """
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(STDIN, 1 << 16)
        if not piece:
            raise SystemExit(0)
        line += piece
    # Nothing that is started from here may have the pipe.
    pipe = os.dup(STDIN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    threading.Thread(target=_end_with, args=(pipe,), name="handover", daemon=True).start()
    handover = json.loads(line)
    os.umask(handover["umask"])
    shown = handover["certificate"]
    trust = Trust(pinned=None if shown is None else Path(shown))
    return handover["token"], Settings(**{name: handover[name] for name in ("clusters", *SHARED_SETTINGS)}), trust


def _end_with(pipe: int) -> None:
    """Wait for the end of a pipe, or of a socket in its place, then end this process."""
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_TIMEOUT)
    os._exit(1)
