"""The registration of pages and form actions as routes, their rendering and their cache."""

import asyncio
import secrets
import time
from asyncio import to_thread
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from hashlib import sha256
from hmac import compare_digest
from inspect import signature
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse
from pydantic import TypeAdapter, ValidationError

from koalapy.api.access import Caller, identity_of, session_of
from koalapy.api.fields import Reason
from koalapy.api.problems import describe_error
from koalapy.api.routes import cancel_on_disconnect, reject_unknown_parameters
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.jobs.changes import Changes
from koalapy.dashboard.cluster_table import render_nodes
from koalapy.dashboard.job_table import render_jobs
from koalapy.dashboard.rendering import HEADERS, render, with_query
from koalapy.dashboard.shared_pages import SharedPage, compress_page
from koalapy.dashboard.tables import TableDefinition, render_csv, render_table
from koalapy.model.errors import ForbiddenError, KoalaError, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.simulation.twin import Report

STALE_LIFETIME_S = 0.5
"""Least time for which a cached page is used after an unannounced change."""
STALE_SHARE = 0.25
"""Share of the interval between signals for which it is used, so that many viewers share it after a signal."""
FRESH_LIFETIME_S = 5.0
"""Time for which a cached page is used while nothing changes."""
MAX_PAGES = 500
REQUEST_COST_S = 0.003
"""CPU time of a signal to one page and its request for the cached page."""
_CSRF_PLACEHOLDER = secrets.token_hex(32)
"""Stands for the token of a session in a page that is shared. It is random, so that no text of a user is replaced."""
P = TypeVar("P")


@dataclass(slots=True)
class _CachedPage:
    """A page that is rendered or being rendered, with the version of the state that it shows."""

    task: "asyncio.Task[Any]"
    created_at: float
    version: str
    waiting_requests: int = 0


class PageCache:
    """A cache of rendered pages, by their address and caller."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._pages: dict[Hashable, _CachedPage] = {}

    def clear(self) -> None:
        """Drop all pages, so that a user sees the result of an action at once."""
        self._pages.clear()

    async def get(self, key: Hashable, render_page: Callable[[], Awaitable[P]]) -> P:
        """Return the cached page, or render it once for all requests that wait for it."""
        now, cached = asyncio.get_running_loop().time(), self._pages.get(key)
        if cached is not None and cached.created_at > self._changes.signalled_at:
            is_fresh = cached.version == self._changes.version
            stale_lifetime = max(STALE_LIFETIME_S, STALE_SHARE * self._changes.interval)
            if now - cached.created_at >= (FRESH_LIFETIME_S if is_fresh else stale_lifetime):
                cached = None
        else:
            cached = None
        if cached is None:
            if len(self._pages) >= MAX_PAGES:
                self._pages.clear()
            cached = _CachedPage(asyncio.ensure_future(render_page()), now, self._changes.version)
            self._pages[key] = cached
        cached.waiting_requests += 1
        try:
            # A client that disconnects does not cancel the page for other requests.
            page: P = await asyncio.shield(cached.task)
            return page
        except BaseException:
            if cached.waiting_requests == 1:
                cached.task.cancel()
            if (cached.waiting_requests == 1 or cached.task.done()) and self._pages.get(key) is cached:
                del self._pages[key]
            raise
        finally:
            cached.waiting_requests -= 1


Load = Callable[..., Coroutine[Any, Any, Any]]
Simulate = Callable[[Report], Awaitable[Any]]
Prepare = Callable[..., Awaitable[Simulate]]
Act = Callable[..., Awaitable[str]]
FormAnswer = str | tuple[Any, int]
Answer = Callable[..., Awaitable[FormAnswer]]
MAX_FIELDS = 2000
"""Maximum number of fields in a form."""
_REASON: TypeAdapter[str] = TypeAdapter(Reason)


@dataclass(frozen=True, slots=True)
class Link:
    """An entry of the navigation, visible to callers with the role."""

    path: str
    title: str
    key: str
    role: Role = Role.USER


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
        reason = self.get("reason")
        try:
            return _REASON.validate_python(reason)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]["msg"]
            hint = "give one line of at most 1000 characters"
            raise UsageError(f"the reason is not valid: {problem}", field="reason", hint=hint) from error


class Dashboard:
    """The registry of pages and form actions.

    Each names the corresponding REST operation, so that ``api/access.py`` defines the access to it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.changes = engine, engine.changes
        self.router = APIRouter(include_in_schema=False)
        self.links: list[Link] = []
        self._cache = PageCache(engine.changes)

    # Pages

    def page(
        self,
        path: str,
        template: str,
        *,
        operation: str,
        title: str,
        key: str = "",
        role: Role = Role.USER,
        live: bool = True,
        shared: bool = False,
        table: TableDefinition[Any] | None = None,
    ) -> Callable[[Load], Load]:
        """Register a function as the page at ``path``, with its JSON at ``path.json``.

        The function's parameters are those of the query; it returns a dataclass, the template's ``view``. A page with
        a ``key`` is in the navigation of callers with the ``role``. Only a ``live`` page follows changes. All
        operators see the same content of a ``shared`` page, as do all callers of a role if the function has no
        parameter ``caller``. The rows of the ``table`` are also CSV at ``path.csv``: the view's field ``table``
        describes them, and the field of the table's name holds them.
        """
        if key:
            assert all(link.key != key for link in self.links), f"two pages have the key {key}"
            self.links.append(Link(path, title, key, role))

        def register(load: Load) -> Load:
            """Add the routes of the page and of its JSON, and return the function unchanged."""
            bound, uses_caller = Depends(_bound(load)), "caller" in signature(load).parameters

            async def html(request: Request, caller: Caller, load: Callable[[], Awaitable[Any]] = bound) -> Response:
                """Respond with the page, from the cache if possible; to htmx only with its content."""
                is_part = "hx-request" in request.headers
                is_shared = is_part and (not uses_caller or (shared and caller.has_role(Role.OPERATOR)))

                async def render_page() -> SharedPage:
                    """Compute the view, and render it in a thread as compressed HTML."""
                    version, now = self.changes.version, self.engine.clock()
                    view = await load()
                    context = self._make_context(request, caller) | {
                        "view": view,
                        "title": title,
                        "definition": table,
                        "now": now,
                        "events": with_query("/events", since=version) if live else "",
                        "layout": "part.html" if is_part else "base.html",
                        "csrf": _CSRF_PLACEHOLDER,
                    }
                    if is_shared:
                        del context["caller"]
                    start = time.thread_time()
                    page, thread_seconds = await to_thread(_render_compressed, template, context)
                    self.changes.add_cost(thread_seconds + time.thread_time() - start)
                    return page

                viewer = caller.groups, *(() if is_shared else (caller.user, session_of(request.scope)))
                key = (request.url.path, request.url.query, is_part, caller.role, viewer)
                page = await cancel_on_disconnect(request, self._cache.get(key, render_page))
                if is_part and live:
                    self.changes.add_cost(REQUEST_COST_S)
                csrf = csrf_token(request).encode()
                if "gzip" in request.headers.get("accept-encoding", ""):
                    headers = HEADERS | {"Content-Encoding": "gzip", "Vary": "Accept-Encoding, HX-Request"}
                    return Response(page.as_gzip(csrf), 200, headers, "text/html; charset=utf-8")
                return HTMLResponse(page.as_bytes(csrf), 200, HEADERS)

            async def as_json(request: Request, load: Callable[[], Coroutine[Any, Any, Any]] = bound) -> JSONResponse:
                return JSONResponse(jsonable_encoder(await cancel_on_disconnect(request, load())))

            async def as_csv(request: Request, load: Callable[[], Coroutine[Any, Any, Any]] = bound) -> Response:
                view = await cancel_on_disconnect(request, load())
                assert table is not None
                text = await to_thread(render_csv, table, view.table, getattr(view, table.name))
                name = f'attachment; filename="{path.strip("/").replace("/", "-")}.csv"'
                return Response(text, 200, {"Content-Disposition": name}, "text/csv; charset=utf-8")

            checks = [Depends(reject_unknown_parameters)]
            json_path = "/now.json" if path == "/" else f"{path}.json"
            # Registered first, since a path parameter of the page would match the suffix.
            self.router.add_api_route(json_path, as_json, operation_id=operation, dependencies=checks)
            if table is not None:
                self.router.add_api_route(f"{path}.csv", as_csv, operation_id=operation, dependencies=checks)
            self.router.add_api_route(path, html, operation_id=operation, dependencies=checks)
            return load

        return register

    def _make_context(self, request: Request, caller: Identity | None) -> dict[str, Any]:
        """Return the template variables that every page has."""
        path, query = request.url.path, f"?{request.url.query}" if request.url.query else ""
        return {
            "path": path,
            "here": path + query,
            "json_path": ("/now.json" if path == "/" else f"{path}.json") + query,
            "links": [link for link in self.links if caller is not None and caller.has_role(link.role)],
            "caller": caller,
            "is_operator": caller is not None and caller.has_role(Role.OPERATOR),
            "is_admin": caller is not None and caller.has_role(Role.ADMIN),
            "csrf": csrf_token(request),
            "render_table": render_table,
            "render_jobs": render_jobs,
            "render_nodes": render_nodes,
        }

    def render_plain(self, request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
        """Render a page without updates, such as an error or the login."""
        common = self._make_context(request, identity_of(request.scope))
        common |= {"layout": "plain.html", "now": self.engine.clock(), "events": ""}
        return HTMLResponse(render(template, common | context), status, HEADERS)

    def render_problem(self, request: Request, status: int, problem: dict[str, Any]) -> Response:
        """Render a problem as a page, or redirect a caller that is not logged in to the login."""
        if status == 401:
            login = with_query("/login", next=request.url.path + (f"?{request.url.query}" if request.url.query else ""))
            if "hx-request" in request.headers:
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
            """Add the route of the stream, and return the function unchanged."""
            bound = Depends(_bound(prepare))

            async def stream(
                request: Request, caller: Caller, prepare: Callable[[], Awaitable[Simulate]] = bound
            ) -> StreamingResponse:
                context = self._make_context(request, caller)
                parts = self._follow_simulation(await prepare(), template, context)
                return StreamingResponse(parts, 200, HEADERS | {"Cache-Control": "no-store"}, "text/event-stream")

            checks = [Depends(reject_unknown_parameters)]
            self.router.add_api_route(path, stream, operation_id=operation, dependencies=checks)
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
                yield _html_event(render("progress.html", {"completed": report[0], "total": report[1]}))
            try:
                page = await to_thread(
                    render, template, context | {"result": task.result(), "now": self.engine.clock()}
                )
            except KoalaError as error:
                page = render("problem_part.html", {"problem": describe_error(error)})
            except RuntimeError:
                problem = {"detail": "the simulation failed", "hint": "see the daemon's log"}
                page = render("problem_part.html", {"problem": problem})
            yield _html_event(page)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # Actions

    def action(self, path: str, *, operation: str) -> Callable[[Act], Act]:
        """Register a function as the action of a form (``POST``); it returns the path of the page to show next."""

        def register(act: Act) -> Act:
            """Add the route of the action, and return the function unchanged."""
            bound = Depends(_bound(act))

            async def post(request: Request, act: Callable[[], Awaitable[str]] = bound) -> Response:
                """Run the action, drop cached pages, and send the browser to the next page."""
                next_page = await act()
                self._cache.clear()
                if "hx-request" in request.headers:
                    return Response(status_code=204, headers={"HX-Redirect": next_page})
                return RedirectResponse(next_page, 303)

            self.router.add_api_route(
                path, post, methods=["POST"], operation_id=operation, dependencies=[Depends(read_checked_form)]
            )
            return act

        return register

    def form(self, path: str, template: str, *, operation: str, title: str) -> Callable[[Answer], Answer]:
        """Register a function as the receiver of a form, which it may show again.

        The function returns the path of the page to show next, or a view and the status with which it is rendered.
        """

        def register(answer: Answer) -> Answer:
            """Add the route of the form, and return the function unchanged."""
            bound = Depends(_bound(answer))

            async def post(
                request: Request, caller: Caller, answer: Callable[[], Awaitable[FormAnswer]] = bound
            ) -> Response:
                result = await answer()
                if isinstance(result, str):
                    self._cache.clear()
                    if "hx-request" in request.headers:
                        return Response(status_code=204, headers={"HX-Redirect": result})
                    return RedirectResponse(result, 303)
                view, status = result
                layout = "part.html" if "hx-request" in request.headers else "base.html"
                shown = {"view": view, "title": title, "now": self.engine.clock(), "events": "", "layout": layout}
                context = self._make_context(request, caller) | {"definition": None} | shown
                return HTMLResponse(await to_thread(render, template, context), status, HEADERS)

            self.router.add_api_route(
                path, post, methods=["POST"], operation_id=operation, dependencies=[Depends(read_checked_form)]
            )
            return answer

        return register


def _bound(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Return a dependency with the function's parameters. It returns a deferred call of the function."""

    @wraps(function)
    async def bound(**parameters: Any) -> Callable[[], Awaitable[Any]]:
        return partial(function, **parameters)

    return bound


def _html_event(page: str) -> str:
    """Return HTML as an event without a name, which replaces the content of the page's element."""
    lines = page.replace("\r", "").split("\n")
    return "".join(f"data: {line}\n" for line in lines if line) + "\n"


def _render_compressed(template: str, context: dict[str, Any]) -> tuple[SharedPage, float]:
    """Return a compressed page, and the CPU time of its rendering in seconds."""
    start = time.thread_time()
    page = compress_page(render(template, context), _CSRF_PLACEHOLDER)
    return page, time.thread_time() - start


def csrf_token(request: Request) -> str:
    """Return the token that proves a form was sent from a page of the same session; empty without a session."""
    session = session_of(request.scope)
    return sha256(f"form {session}".encode()).hexdigest() if session else ""


async def read_form(request: Request) -> Form:
    """Parse the form of a request; raise ``UsageError`` if there is none."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/x-www-form-urlencoded":
        raise UsageError(
            f"Content-Type is {content_type!r}, not that of a form",
            field="Content-Type",
            value=content_type,
            hint="send application/x-www-form-urlencoded",
        )
    try:
        text = (await request.body()).decode()
        fields = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise UsageError(
            f"the form is not UTF-8, or has more than {MAX_FIELDS} fields",
            field="body",
            hint="reload the page and send it again",
        ) from error
    return Form(dict(fields))


async def read_checked_form(request: Request) -> Form:
    """Parse the form of a browser session; raise ``ForbiddenError`` unless a page of the same session sent it."""
    form = await read_form(request)
    expected = csrf_token(request)
    if not expected or not compare_digest(form.get("csrf").encode(), expected.encode()):
        raise ForbiddenError(
            "this form was sent by a page of another browser session",
            field="csrf",
            hint="reload the page and try again",
        )
    return form


SentForm = Annotated[Form, Depends(read_checked_form)]
"""The submitted form of an action."""
