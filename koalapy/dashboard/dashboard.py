"""The registration of pages and form actions as routes, their rendering and their cache."""

import asyncio
import gzip
import re
import time
from asyncio import to_thread
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial, wraps
from hashlib import sha256
from hmac import compare_digest
from inspect import signature
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse
from pydantic import BaseModel, ValidationError

from koalapy.api.access import Caller, identity_of, session_of
from koalapy.api.jobs import ActionReason
from koalapy.api.problems import describe_error, usage_error
from koalapy.api.routes import cancel_on_disconnect, reject_unknown_parameters
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.jobs.changes import MIN_INTERVAL
from koalapy.dashboard.cluster_table import NODES
from koalapy.dashboard.job_table import JOBS
from koalapy.dashboard.rendering import ENVIRONMENT, HEADERS, render, with_query
from koalapy.dashboard.rows import Survey
from koalapy.dashboard.shared_pages import GZIP_HEADER, LEVEL, Event, LivePages, as_event_data
from koalapy.dashboard.tables import TableDefinition, fill_table, render_csv
from koalapy.model.errors import ForbiddenError, KoalaError, UsageError, reject
from koalapy.model.identity import Identity, Role
from koalapy.simulation.twin import Report

GZIP = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
GROUPS = {
    "Grid": ("/", "/clusters", "/timeline", "/network", "/maintenance"),
    "Work": ("/queue", "/my-jobs", "/users", "/files"),
    "Insight": ("/history", "/forecast"),
    "Admin": ("/scheduler",),
}
"""The groups of the menu, with the paths of their pages."""
ENVIRONMENT.globals |= {"fill_table": fill_table, "jobs_table": JOBS, "nodes_table": NODES}
SUFFIX = ".events"
"""End of the address of a page's stream."""

View = dict[str, Any]
"""The variables of a template, in its variable ``view``."""
Load = Callable[..., Coroutine[Any, Any, Any]]
BoundLoad = Callable[[], Coroutine[Any, Any, Any]]
Simulate = Callable[[Report], Awaitable[Any]]
Prepare = Callable[..., Awaitable[Simulate]]
FormAnswer = str | tuple[Any, int]
Act = Callable[..., Awaitable[FormAnswer]]
MAX_FIELDS = 2000
"""Maximum number of fields in a form."""
M = TypeVar("M", bound=BaseModel)


def parse_body(model: type[M], body: Mapping[str, Any]) -> M:
    """Return the fields of a form as the body of the REST API that they stand for.

    Raise ``UsageError`` about the first invalid field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = [{**details, "loc": ("body", *details["loc"])} for details in error.errors(include_url=False)]
        raise usage_error(errors, model) from error


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a submitted form."""

    fields: Mapping[str, str]

    def get(self, name: str) -> str:
        """Return a field without surrounding blanks; empty if it is missing."""
        return self.fields.get(name, "").strip()

    @property
    def reason(self) -> str:
        """Return the reason for an action, in one line. Raise ``UsageError`` if it is invalid."""
        return parse_body(ActionReason, {"reason": self.get("reason")}).reason


class Dashboard:
    """The registry of pages and form actions.

    Each names the corresponding REST operation, so that ``api/access.py`` defines the access to it.
    """

    def __init__(self, engine: Engine, survey: Survey) -> None:
        self.engine, self.changes, self.survey = engine, engine.changes, survey
        self.router = APIRouter(include_in_schema=False)
        self._menu: dict[str, tuple[str, str]] = {}
        """The titles and keys of the pages in the menu, by path."""
        self.live_pages = LivePages(engine.changes)

    # Pages

    def page(
        self,
        path: str,
        template: str,
        *,
        operation: str,
        title: str,
        key: str = "",
        live: bool = True,
        shared: bool = False,
        pause: float = MIN_INTERVAL,
        table: TableDefinition[Any] | None = None,
    ) -> Callable[[Load], Load]:
        """Register a function as the page at ``path``, with its JSON at ``path.json``.

        The function's parameters are those of the query; it returns the template's ``view``. A page with a ``key`` is
        in the menu. A ``live`` page follows changes by the stream at ``path.events``, at least ``pause`` seconds apart.
        All operators see the same content of a ``shared`` page, whose template uses no ``caller``, as do all callers of
        a role if the function has no parameter ``caller``. The rows of the ``table`` are also CSV at ``path.csv``:
        ``table`` in the view describes them, and the table's name holds them.
        """
        if key:
            self._menu[path] = title, key

        def register(load: Load) -> Load:
            """Add the routes of the page in all its forms, and return the function unchanged."""
            uses_caller = "caller" in signature(load).parameters
            page = _Page(self, path, template, title, live, shared, pause, table, uses_caller)
            bound, checks = Depends(_bound(load)), [Depends(reject_unknown_parameters)]
            # The page itself comes last, since a path parameter of it would match the suffixes.
            routes = {_twin(path, "", ".json"): partial(page.as_json, load=bound)}
            if table is not None:
                routes[f"{path}.csv"] = partial(page.as_csv, load=bound)
            if live:
                routes[_twin(path, "", SUFFIX)] = partial(page.as_events, load=bound)
            routes[path] = partial(page.as_html, load=bound)
            for address, route in routes.items():
                self.router.add_api_route(address, route, operation_id=operation, dependencies=checks)
            return load

        return register

    def make_context(self, request: Request, caller: Identity | None, **values: Any) -> dict[str, Any]:
        """Return the variables of a template: those that every page has, and ``values``."""
        path, query = request.url.path.removesuffix(SUFFIX), request.url.query
        path = "/" if path == "/now" else path
        return {
            "path": path,
            "here": f"{path}?{query}" if query else path,
            "json_path": _twin(path, query, ".json"),
            "menu": {} if caller is None else self._make_menu(),
            "caller": caller,
            "is_operator": caller is not None and caller.has_role(Role.OPERATOR),
            "is_admin": caller is not None and caller.has_role(Role.ADMIN),
            "csrf": csrf_token(request),
            "now": self.engine.clock(),
            "layout": "base.html",
            "events": "",
            "definition": None,
        } | values

    def _make_menu(self) -> dict[str, list[tuple[str, str, str, int | None]]]:
        """Return the paths, titles and keys of pages by group, with the number of jobs or clusters of some."""
        counts = {"/queue": self.survey.listed, "/clusters": len(self.engine.queries.grid.clusters())}
        return {name: [(path, *self._menu[path], counts.get(path)) for path in paths] for name, paths in GROUPS.items()}

    def render_plain(self, request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
        """Render a page without updates, such as an error or the login."""
        context = self.make_context(request, identity_of(request.scope), layout="plain.html", **context)
        return HTMLResponse(render(template, context), status, HEADERS)

    def render_problem(self, request: Request, status: int, problem: dict[str, Any]) -> Response:
        """Render a problem as a page, or redirect a caller that is not logged in to the login."""
        if status == 401:
            is_part, is_read = "hx-request" in request.headers, request.method == "GET"
            if is_part and not is_read:
                return Response(status_code=401)  # the page keeps what was typed
            sender = request.headers.get("hx-current-url") or request.headers.get("referer", "")
            address = sender if is_part or not is_read else str(request.url)
            login = with_query("/login", next=re.sub(r"^\w+://[^/]*|#.*", "", address) or "/")
            if is_part:
                return Response(status_code=401, headers={"HX-Redirect": login})
            return RedirectResponse(login, 303)
        template = "problem_part.html" if "hx-request" in request.headers else "problem.html"
        return self.render_plain(request, template, status, problem=problem, title=problem["title"])

    def simulation(self, path: str, template: str, *, operation: str) -> Callable[[Prepare], Prepare]:
        """Register a function that prepares a simulation. Its progress and result are streamed into a page.

        The function checks its parameters, and returns the function that simulates and returns the template's
        ``result``. The simulation is cancelled when the page is left.
        """

        def register(prepare: Prepare) -> Prepare:
            bound = Depends(_bound(prepare))

            @self.router.get(path, operation_id=operation, dependencies=[Depends(reject_unknown_parameters)])
            async def stream(
                request: Request, caller: Caller, prepare: Callable[[], Awaitable[Simulate]] = bound
            ) -> StreamingResponse:
                parts = self._follow_simulation(await prepare(), template, self.make_context(request, caller))
                return StreamingResponse(parts, 200, EVENTS)

            return prepare

        return register

    async def _follow_simulation(
        self, simulate: Simulate, template: str, context: dict[str, Any]
    ) -> AsyncIterator[str]:
        """Yield the progress of a simulation and then its result or problem, each as an event with HTML."""
        reports: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()
        task = asyncio.ensure_future(simulate(lambda completed, total: reports.put_nowait((completed, total))))
        task.add_done_callback(lambda _: reports.put_nowait(None))
        try:
            while (report := await reports.get()) is not None:
                yield as_event_data(render("progress.html", {"completed": report[0], "total": report[1]})) + "\n"
            try:
                page = await to_thread(
                    render, template, context | {"result": task.result(), "now": self.engine.clock()}
                )
            except KoalaError as error:
                page = render("problem_part.html", {"problem": describe_error(error)})
            except RuntimeError:
                problem = {"detail": "the simulation failed", "hint": "see the daemon's log"}
                page = render("problem_part.html", {"problem": problem})
            yield as_event_data(page) + "\n"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # Actions

    def action(self, path: str, template: str = "", *, operation: str, title: str = "") -> Callable[[Act], Act]:
        """Register a function as the action of a form (``POST``).

        It returns the path of the page to show next, or a view of the template and the status with which to show it.
        """

        def register(act: Act) -> Act:
            bound = Depends(_bound(act))

            @self.router.post(path, operation_id=operation, dependencies=[Depends(read_checked_form)])
            async def post(
                request: Request, caller: Caller, act: Callable[[], Awaitable[FormAnswer]] = bound
            ) -> Response:
                """Run the action, and send the browser to the next page or show the view."""
                result = await act()
                if isinstance(result, str):
                    return _redirect(request, result)
                view, status = result
                layout = "part.html" if "hx-request" in request.headers else "base.html"
                context = self.make_context(request, caller, view=view, title=title, layout=layout, json_path="")
                return HTMLResponse(await to_thread(render, template, context), status, HEADERS)

            return act

        return register


@dataclass(frozen=True, slots=True)
class _Page:
    """A registered page, and its responses in each form from the view that ``load`` returns."""

    dashboard: Dashboard
    path: str
    template: str
    title: str
    live: bool
    shared: bool
    pause: float
    table: TableDefinition[Any] | None
    uses_caller: bool

    async def as_html(self, request: Request, caller: Caller, load: BoundLoad) -> Response:
        """Respond with the page."""
        events = _twin(request.url.path, request.url.query, SUFFIX) if self.live else ""
        version = self.dashboard.changes.version
        context = self.dashboard.make_context(request, caller, events=events, shown_version=version)

        async def load_and_render() -> str:
            return (await self._render(context, await load()))[0]

        page = await cancel_on_disconnect(request, load_and_render())
        if _accepts_gzip(request):
            compressed = await to_thread(gzip.compress, page.encode(), LEVEL)
            return Response(compressed, 200, HEADERS | GZIP, "text/html; charset=utf-8")
        return HTMLResponse(page, 200, HEADERS)

    async def as_events(
        self,
        request: Request,
        caller: Caller,
        load: BoundLoad,
        last: Annotated[str, Header(alias="Last-Event-ID", max_length=100)] = "",
    ) -> Response:
        """Stream the page's content whenever it differs, as events with its version as id.

        The forms in it have no token of the session, so that viewers share it; the script of the page inserts it.
        """
        context = self.dashboard.make_context(request, caller, csrf="", layout="part.html")
        if self.shared or not self.uses_caller:
            del context["caller"]
        is_personal = self.uses_caller and not (self.shared and caller.has_role(Role.OPERATOR))
        viewer = (caller.user, "" if self.shared else session_of(request.scope)) if is_personal else ()
        key = (context["here"], caller.role, caller.groups, viewer)
        render_view = partial(self._render, context)
        return await _stream(request, self.dashboard.live_pages.follow(key, load, render_view, self.pause, last))

    async def as_json(self, request: Request, load: BoundLoad) -> Response:
        """Respond with the view as JSON."""
        return JSONResponse(jsonable_encoder(await cancel_on_disconnect(request, load())))

    async def as_csv(self, request: Request, load: BoundLoad) -> Response:
        """Respond with the rows of the table as a file. Raise ``UsageError`` if its filter has a problem."""
        view, table = await cancel_on_disconnect(request, load()), self.table
        assert table is not None
        if problem := view.get("problem"):
            raise UsageError(problem, field="q", value=view["q"], hint=view["hint"])
        text = await to_thread(render_csv, table, view["table"], view[table.name])
        name = f'attachment; filename="{self.path.strip("/").replace("/", "-")}.csv"'
        return Response(text, 200, {"Content-Disposition": name}, "text/csv; charset=utf-8")

    async def _render(self, context: dict[str, Any], view: Any) -> tuple[str, float]:
        """Render the page in a thread; return it and the CPU time."""
        context = context | {"view": view, "title": self.title, "definition": self.table}
        context["now"] = self.dashboard.engine.clock()
        return await to_thread(_render_measured, self.template, context)


def _bound(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Return a dependency with the function's parameters. It returns a deferred call of the function."""

    @wraps(function)
    async def bound(**parameters: Any) -> Callable[[], Awaitable[Any]]:
        return partial(function, **parameters)

    return bound


def _render_measured(template: str, context: dict[str, Any]) -> tuple[str, float]:
    """Return a page, and the CPU time of its rendering in seconds."""
    start = time.thread_time()
    text = render(template, context)
    return text, time.thread_time() - start


def _twin(path: str, query: str, suffix: str) -> str:
    """Return the address of a page in another form."""
    return ("/now" if path == "/" else path) + suffix + (f"?{query}" if query else "")


def _redirect(request: Request, page: str) -> Response:
    """Return a response to a form that sends the browser to the next page."""
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={"HX-Redirect": page})
    return RedirectResponse(page, 303)


def _accepts_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


async def _stream(request: Request, events: AsyncGenerator[Event]) -> Response:
    """Return a response that sends events; raise an error of the first one."""
    is_compressed = _accepts_gzip(request)
    await anext(events)

    async def encode_all() -> AsyncIterator[bytes]:
        async with aclosing(events):
            if is_compressed:
                yield GZIP_HEADER
            async for event in events:
                yield event.compressed if is_compressed else event.plain

    return StreamingResponse(encode_all(), 200, EVENTS | GZIP if is_compressed else EVENTS)


def csrf_token(request: Request) -> str:
    """Return the token that proves a form was sent from a page of the same session; empty without a session."""
    session = session_of(request.scope)
    return sha256(f"form {session}".encode()).hexdigest() if session else ""


async def read_form(request: Request) -> Form:
    """Parse the form of a request; raise ``UsageError`` if there is none."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/x-www-form-urlencoded":
        wrong = f"is {content_type!r}, not that of a form"
        reject("Content-Type", content_type, wrong, "send application/x-www-form-urlencoded")
    try:
        text = (await request.body()).decode()
        fields = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        problem = f"the form is not UTF-8, or has more than {MAX_FIELDS} fields"
        raise UsageError(problem, field="body", hint="reload the page and send it again") from error
    return Form(dict(fields))


async def read_checked_form(request: Request) -> Form:
    """Parse the form of a browser session; raise ``ForbiddenError`` unless a page of the same session sent it."""
    form = await read_form(request)
    expected = csrf_token(request)
    if not expected or not compare_digest(form.get("csrf").encode(), expected.encode()):
        problem = "this form was sent by a page of another browser session"
        raise ForbiddenError(problem, field="csrf", hint="reload the page and try again")
    return form


SentForm = Annotated[Form, Depends(read_checked_form)]
"""The submitted form of an action."""
