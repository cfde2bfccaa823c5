"""``/metrics``, as Prometheus and all that speak its language ask for it; and what counts the requests."""

import asyncio
import time
from itertools import chain

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.exposition import Exposition
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.observability.figures import figures_of
from koalapy.daemon.observability.instruments import Requests

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
"""A method that we do not know, and what is no route's."""
BELOW = "/api/v1"
"""What routes do not say that stand below it with others."""
KINDS = ("text/plain", "application/openmetrics-text")
MIN_INTERVAL_S = 1.0
"""Seconds in which the figures are computed once, however many requests ask for them."""


class _Whole:
    """Our own metrics, and those of the process."""

    def __init__(self, own: Exposition, process: ProcessCollector) -> None:
        self._own, self._process = own, process

    def collect(self) -> "chain[Metric]":
        return chain(self._own.collect(), self._process.collect())


class Scrapes:
    """Encode the metrics for scrapers, and compute them at most once per interval."""

    def __init__(self, engine: Engine, health: HealthMonitor, alerts: Alerts, min_interval_s: float) -> None:
        self._engine, self._health, self._alerts = engine, health, alerts
        self._min_interval_s = min_interval_s
        self._process = ProcessCollector(registry=None)
        self._made_at = float("-inf")
        self._made: dict[str, tuple[bytes, str]] = {}
        """By what was asked for, and of which type it is."""
        self._making = asyncio.Lock()

    async def told(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the form that is asked for, and what form that is."""
        encode, form = choose_encoder(accept)
        async with self._making:
            if time.monotonic() - self._made_at >= self._min_interval_s:
                self._made.clear()
            if form not in self._made:
                whole = _Whole(
                    Exposition(await figures_of(self._engine, self._health, self._alerts), self._engine.instruments),
                    self._process,
                )
                self._made_at = time.monotonic()
                self._made[form] = (await asyncio.to_thread(encode, whole), form)
            return self._made[form]


def add_metrics(
    app: FastAPI,
    engine: Engine,
    health: HealthMonitor,
    alerts: Alerts,
    *,
    is_open: bool,
    min_interval_s: float = MIN_INTERVAL_S,
) -> None:
    """Count requests from now on, and serve all counts and times; ``is_open``: to requests without a token, too."""
    app.include_router(_metrics_router(Scrapes(engine, health, alerts, min_interval_s), is_open=is_open))
    app.add_middleware(RequestCounter, requests=engine.instruments.requests)


def _metrics_router(scrapes: Scrapes, *, is_open: bool) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/metrics",
        response_class=Response,
        tags=["health"],
        operation_id="scrape_openly" if is_open else "scrape",
        responses={200: {"content": {kind: {"schema": {"type": "string"}} for kind in KINDS}}},
    )
    async def metrics(request: Request) -> Response:
        """What the daemon counts and times of itself, as Prometheus reads it."""
        content, form = await scrapes.told(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": form})

    return router


class RequestCounter:
    """Counts what is answered, by route, method and status, and times it until the answer begins."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(scope, message["status"], time.monotonic() - began)
            await send(message)

        await self._app(scope, receive, counting)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", OTHER)
        if route != OTHER and scope["path"].startswith(BELOW) and not route.startswith(BELOW):
            route = f"{BELOW}{route}"
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self._requests.note(route, method, status, seconds)
