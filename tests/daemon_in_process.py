"""The daemon of ``tests.serving`` on a port of this machine, for clients that are not asynchronous."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.listener.connections import WebSockets
from koalapy.scheduler.rules import Rules
from tests.daemon.sites import Sites
from tests.serving import CSRF_HEADER, TOKEN, app_of, serving

MAX_WAIT_S = 60.0


@dataclass(frozen=True)
class ServedDaemon:
    url: str
    engine: Engine
    http: httpx2.Client
    """An administrator's client."""
    alerts: Alerts
    loop: asyncio.AbstractEventLoop
    """The loop of the engine, which runs in another thread."""
    admin_token: str = TOKEN

    def job(self, ident: int) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get(f"/api/v1/jobs/{ident}").json()
        return answer


@contextmanager
def daemon_in_thread(
    path: Path, sites: Sites | None = None, *, rules: Rules | None = None, has_dashboard: bool = False, **options: Any
) -> Iterator[ServedDaemon]:
    """Serve a daemon with its database at ``path`` from a thread while the block runs.

    ``options`` are those of ``serving``.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as in ``bind_listener``
    ready: Future[tuple[uvicorn.Server, Engine, Alerts, asyncio.AbstractEventLoop]] = Future()

    async def serve() -> None:
        try:
            async with serving(path, [], rules or Rules(), sites, has_dashboard=has_dashboard, **options) as client:
                app = app_of(client)
                server = uvicorn.Server(
                    uvicorn.Config(
                        app, ws=WebSockets, lifespan="off", log_level="critical", timeout_graceful_shutdown=1
                    )
                )
                ready.set_result((server, app.state.engine, app.state.alerts, asyncio.get_running_loop()))
                await server.serve([listener])
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    server, engine, alerts, loop = ready.result(MAX_WAIT_S)
    try:
        # Connections that come before the server accepts them wait in the listener's queue.
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        headers = CSRF_HEADER | {"Authorization": f"Bearer {TOKEN}"}
        with httpx2.Client(base_url=url, headers=headers, timeout=MAX_WAIT_S) as http:
            yield ServedDaemon(url, engine, http, alerts, loop)
    finally:
        server.should_exit = True
        thread.join(MAX_WAIT_S)
        assert not thread.is_alive()
