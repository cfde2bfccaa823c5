"""The end of a daemon with a hanging database, in a subprocess, since hanging threads would block this process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from koalapy.daemon.agents.embedded import EmbeddedAgents
from koalapy.daemon.engine.engine import WorkItem
from koalapy.daemon.listener.connections import Connections
from koalapy.daemon.main import Daemon
from koalapy.scheduler.events import ClusterDrained
from tests.daemon.test_hub import Daemon as Parts

pytestmark = pytest.mark.processes

DEADLINE = 60.0


async def _do_nothing(*request: object) -> None:
    pass


async def _be_told_to_end_while_the_database_hangs(directory: Path) -> None:
    parts = Parts(directory / "koala.db")
    is_queried = threading.Event()

    def hang(*args: object) -> None:
        is_queried.set()
        threading.Event().wait()

    parts.store.write = parts.store.renew_lease = parts.store.release_lease = hang  # type: ignore[method-assign]

    def serving(url: str) -> None:
        parts.engine.post(WorkItem(events=(ClusterDrained("north"),)))
        threading.Thread(target=lambda: is_queried.wait() and os.kill(os.getpid(), signal.SIGTERM), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    agents = EmbeddedAgents([], lambda cluster, reason: None)
    daemon = Daemon(
        *(parts.engine, parts.store, parts.hub, _do_nothing, listener, Connections(1000), agents, serving),
        give_up=lambda: print("the audit is in the log", file=sys.stderr),
    )
    await daemon.run()


def test_daemon_with_hanging_database_ends_on_signal(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    completed = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path)],
        cwd=root,
        timeout=DEADLINE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 1, completed.stderr
    assert "without a clean stop: the database does not answer" in completed.stdout + completed.stderr
    assert "the audit is in the log" in completed.stderr


HANG_ONE_BY_ONE = """
import asyncio, threading, time
from koalapy.model.errors import StoreUnavailable
from koalapy.daemon.engine import database
from koalapy.daemon.observability import audit

hang = threading.Event().wait

class Store:
    append_audit = staticmethod(hang)

async def run():
    working = asyncio.ensure_future(database.run_in_database(hang))
    trail = audit.Audit(Store(), time.time)
    await trail.record("login", None, origin="192.0.2.1")
    await trail.end_writing()
    try:
        await database.query(hang)
    except StoreUnavailable:
        print("told")

asyncio.run(run())
"""


def test_process_with_hanging_queries_ends(tmp_path: Path) -> None:
    """Some connections hang while others work. Threads waiting for the hanging ones must not delay the end."""
    completed = subprocess.run(
        [sys.executable, "-c", HANG_ONE_BY_ONE], timeout=DEADLINE, capture_output=True, text=True, check=True
    )
    assert completed.stdout.splitlines()[-1] == "told"


if __name__ == "__main__":
    asyncio.run(_be_told_to_end_while_the_database_hangs(Path(sys.argv[1])))
