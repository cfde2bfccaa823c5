"""The whole dashboard: its pages, login and static files."""

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from koalapy.api.middleware import CACHE_FOREVER
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import GZIP, Dashboard
from koalapy.dashboard.login import BrowserLogin, LoginServices
from koalapy.dashboard.pages.audit import add_audit
from koalapy.dashboard.pages.clusters import add_clusters
from koalapy.dashboard.pages.files import add_files
from koalapy.dashboard.pages.forecast import add_forecast
from koalapy.dashboard.pages.history import add_history
from koalapy.dashboard.pages.job import add_job
from koalapy.dashboard.pages.network import add_network
from koalapy.dashboard.pages.new_job import add_new_job
from koalapy.dashboard.pages.overview import add_overview
from koalapy.dashboard.pages.queue import add_queue
from koalapy.dashboard.pages.scheduler import add_scheduler
from koalapy.dashboard.pages.search import add_search
from koalapy.dashboard.pages.timeline import add_timeline
from koalapy.dashboard.pages.users import add_users
from koalapy.dashboard.rendering import load_page_files
from koalapy.dashboard.rows import Survey
from koalapy.model.errors import NotFoundError

MOVED = {
    "/audit": "/scheduler/audit",
    "/capacity": "/forecast",
    "/map": "/network",
    "/what-if": "/forecast/what-if",
    **dict.fromkeys((f"/queue/{action}" for action in ("cancel", "hold", "release", "priority")), "/queue"),
}
"""The present paths of pages by former ones, and those to which the addresses of forms lead."""
CACHE_HEADERS = {"Cache-Control": CACHE_FOREVER}


def build_dashboard(services: Services, engine: Engine, login: LoginServices, audit: Audit) -> Dashboard:
    """Return the dashboard with all its pages."""
    survey = Survey(engine.queries.jobs())
    dashboard = Dashboard(engine, survey)
    engine.subscribe(survey.update)
    add_overview(dashboard, services, survey)
    add_queue(dashboard, services)
    add_search(dashboard)
    add_new_job(dashboard, services)  # before the pages of jobs: their paths would match that of the form
    add_job(dashboard, services, audit)
    add_clusters(dashboard, services, survey, audit)
    add_timeline(dashboard, services)
    add_forecast(dashboard, services)
    add_network(dashboard, services, survey)
    add_scheduler(dashboard)
    add_users(dashboard, services, login.identities, audit)
    add_files(dashboard, services)
    add_audit(dashboard, audit)
    add_history(dashboard, services)
    BrowserLogin(dashboard, login)
    _add_files(dashboard)
    _add_redirects(dashboard)
    return dashboard


def _add_redirects(dashboard: Dashboard) -> None:
    """Add the routes of the addresses that pages had before."""

    async def redirect(request: Request) -> Response:
        """Redirect to the present address, with the query."""
        path, dot, form = request.url.path.partition(".")
        return RedirectResponse(str(request.url.replace(scheme="", netloc="", path=f"{MOVED[path]}{dot}{form}")), 308)

    for path in MOVED:
        for form in ("", ".json", ".csv"):
            dashboard.router.add_api_route(f"{path}{form}", redirect, operation_id="list_clusters")


def _add_files(dashboard: Dashboard) -> None:
    """Add the route of scripts, styles and images, which browsers cache without asking again."""

    @dashboard.router.get("/static/{digest}/{name:path}", operation_id="dashboard_file")
    async def file(request: Request, digest: str, name: str) -> Response:
        """Return a static file. Its path contains the digest of its content."""
        page_file = load_page_files().get(name)
        if page_file is None or page_file.digest != digest:
            raise NotFoundError(f"there is no file {name} with the digest {digest}", hint="reload the page")
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(page_file.compressed, 200, CACHE_HEADERS | GZIP, page_file.type)
        return Response(page_file.content, 200, CACHE_HEADERS, page_file.type)
