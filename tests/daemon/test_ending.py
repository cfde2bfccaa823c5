"""A daemon ends during a takeover, and while its database hangs: in a subprocess, which hanging threads may block."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from koalapy.daemon.agents.embedded import EmbeddedAgents
from koalapy.daemon.engine.engine import WorkItem
from koalapy.daemon.listener.connections import Connections
from koalapy.daemon.main import Daemon
from koalapy.scheduler.events import ClusterDrained
from tests.daemon.test_hub import Daemon as Parts
from tests.needs import find_postgresql
from tests.store.postgresql import Server

pytestmark = pytest.mark.processes

DEADLINE = 60.0
ROOT = Path(__file__).parents[2]
INSTALLED = find_postgresql()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    assert INSTALLED is not None
    server = Server(INSTALLED)
    server.start()
    yield server
    server.remove()


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
    completed = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path)],
        cwd=ROOT,
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


TAKE_OVER = """
import os, signal, sys
from pathlib import Path
from koalapy.daemon import main
from koalapy.daemon.web_server import ServerOptions
from koalapy.model import errors

build, failure = main.Core, sys.argv[2]

def build_core(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    if failure:
        raise getattr(errors, failure)("in a test")
    return build(*arguments)

main.Core = build_core
main.serve("127.0.0.1", 0, Path(sys.argv[1]), None, ServerOptions(standby=True), lambda *urls: print("serves", urls))
print("ended in order")
"""


@pytest.mark.skipif(not INSTALLED, reason="PostgreSQL missing")
@pytest.mark.parametrize("failure", ["", "StoreUnavailable"])
def test_signal_during_takeover_ends_daemon(server: Server, tmp_path: Path, failure: str) -> None:
    command = [sys.executable, "-c", TAKE_OVER, str(tmp_path / "data"), failure]
    environment = os.environ | {"KOALA_DATABASE": server.new_database()}
    completed = subprocess.run(
        command, timeout=DEADLINE, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert (completed.returncode, completed.stdout[-15:]) == (0, "ended in order\n"), completed.stderr


if __name__ == "__main__":
    asyncio.run(_be_told_to_end_while_the_database_hangs(Path(sys.argv[1])))
