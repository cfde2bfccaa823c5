"""All of the dashboard: its pages, its login, its files, and the signal by which pages stay true."""

from collections.abc import AsyncIterator

from fastapi import Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from koalapy.api.middleware import CACHE_FOREVER
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.login import BrowserLogin, LoginServices
from koalapy.dashboard.pages.audit import add_audit
from koalapy.dashboard.pages.capacity import add_capacity
from koalapy.dashboard.pages.clusters import add_clusters, add_now
from koalapy.dashboard.pages.files import add_files
from koalapy.dashboard.pages.history import add_history, add_sharing
from koalapy.dashboard.pages.job import add_job
from koalapy.dashboard.pages.network import add_network
from koalapy.dashboard.pages.queue import add_queue
from koalapy.dashboard.pages.scheduler import add_scheduler
from koalapy.dashboard.pages.users import add_users
from koalapy.dashboard.pages.what_if import add_what_if
from koalapy.dashboard.rendering import load_page_files
from koalapy.dashboard.rows import SurveyCache
from koalapy.model.errors import NotFoundError

KEPT = {"Cache-Control": CACHE_FOREVER}


def build_dashboard(services: Services, engine: Engine, ways: LoginServices, audit: Audit) -> Dashboard:
    """Return the dashboard with all its pages."""
    dashboard = Dashboard(engine)
    surveyor = SurveyCache(engine)
    add_now(dashboard, services, surveyor)
    add_queue(dashboard, services)
    add_job(dashboard, services)
    add_clusters(dashboard, services, surveyor)
    add_capacity(dashboard, services)
    add_network(dashboard, services)
    add_scheduler(dashboard)
    add_users(dashboard, services, ways.identities)
    add_files(dashboard, services)
    add_audit(dashboard, audit)
    add_history(dashboard, services.history)
    add_sharing(dashboard, services)
    add_what_if(dashboard, services.forecasts)
    BrowserLogin(dashboard, ways)
    _add_files(dashboard)
    _add_events(dashboard)
    return dashboard


def _add_files(dashboard: Dashboard) -> None:
    @dashboard.router.get("/static/{digest}/{name:path}", operation_id="dashboard_file")
    async def file(request: Request, digest: str, name: str) -> Response:
        """A file that pages load, under the name that its content gives it."""
        found = load_page_files().get(name)
        if found is None or found.digest != digest:
            raise NotFoundError(f"there is no file {name}", hint="load the page again")
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers = KEPT | {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            return Response(found.compressed, 200, headers, found.type)
        return Response(found.content, 200, KEPT, found.type)


def _add_events(dashboard: Dashboard) -> None:
    changes = dashboard.changes

    @dashboard.router.get("/events", operation_id="dashboard_events", response_class=EventSourceResponse)
    async def events(since: str = "") -> AsyncIterator[ServerSentEvent]:
        """An event ``changed`` whenever something has; pages then ask for themselves again."""
        async for topics in changes.follow(since):
            yield ServerSentEvent(event="changed", data={"topics": sorted(topics), "version": changes.version})
