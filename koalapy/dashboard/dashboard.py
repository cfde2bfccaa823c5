"""How a page is made a route, and an action of a page: what is the same for all of them."""

import asyncio
import gzip
import time
from asyncio import to_thread
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from pydantic import TypeAdapter, ValidationError

from koalapy.api.access import Caller, identity_of, session_of
from koalapy.api.fields import Reason
from koalapy.api.routes import cancel_on_disconnect, reject_unknown_parameters
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.jobs.changes import Changes
from koalapy.dashboard.rendering import HEADERS, render, with_query
from koalapy.model.errors import ForbiddenError, UsageError
from koalapy.model.identity import Identity, Role

SHORT = 0.5
"""Seconds for which a page may be shown again though something has changed since, until that is told."""
LONG = 5.0
"""Seconds for which it may be shown again when nothing has."""
MAX_PAGES = 500


@dataclass(slots=True)
class _Made:
    page: "asyncio.Task[bytes]"
    at: float
    version: str
    asked_by: int = 0
    """As many as wait for it now."""


class PageCache:
    """By what they show, and to whom."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._pages: dict[Hashable, _Made] = {}

    def clear(self) -> None:
        """Somebody has changed something here, and will look."""
        self._pages.clear()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """The page: as it was made just now for another, or made now."""
        loop = asyncio.get_running_loop()
        now, made = loop.time(), self._pages.get(key)
        if made is None or not self._is_good(made, now):
            if len(self._pages) >= MAX_PAGES:
                self._pages.clear()
            made = self._pages[key] = _Made(asyncio.ensure_future(make()), now, self._changes.version)
        made.asked_by += 1
        try:
            # One who goes away does not take the page from the others.
            return await asyncio.shield(made.page)
        except BaseException:
            if made.asked_by == 1:  # nobody waits for it any more
                made.page.cancel()
            if (made.asked_by == 1 or made.page.done()) and self._pages.get(key) is made:
                del self._pages[key]
            raise
        finally:
            made.asked_by -= 1

    def _is_good(self, made: _Made, now: float) -> bool:
        if made.at <= self._changes.told_at:
            return False
        return now - made.at < (LONG if made.version == self._changes.version else SHORT)


Load = Callable[..., Coroutine[Any, Any, Any]]
Act = Callable[..., Awaitable[str]]
MAX_FIELDS = 2000
"""Of a form."""
_REASON: TypeAdapter[str] = TypeAdapter(Reason)


@dataclass(frozen=True, slots=True)
class Link:
    """An entry of the navigation; ``role``: who sees it."""

    path: str
    title: str
    key: str
    role: Role = Role.USER


@dataclass(frozen=True, slots=True)
class Form:
    """What a form of a page says."""

    fields: Mapping[str, str]

    def get(self, name: str) -> str:
        """Without blanks around it; empty where it says nothing."""
        return self.fields.get(name, "").strip()

    @property
    def reason(self) -> str:
        """Why somebody does it, in one line; ``UsageError`` for what can be none."""
        told = self.get("reason")
        try:
            return _REASON.validate_python(told)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]["msg"]
            hint = "give one line of at most 1000 characters"
            raise UsageError(f"the reason cannot be kept: {problem}", field="reason", hint=hint) from error


class Dashboard:
    """Makes routes of what tells (``page``) and of what acts (``action``), each named by the operation of the REST API
    that tells or does the same: so who may call it stands in one table, ``api/access.py``."""

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
    ) -> Callable[[Load], Load]:
        """Make a function a page at ``path``, and its JSON twin at ``path.json``: its parameters are the query's, what
        it returns is one dataclass, which the template knows as ``view``.

        With a ``key`` it is in the navigation; ``role``: who sees it there. One that is not ``live`` stays as it was
        asked for.
        """
        if key:
            self.links.append(Link(path, title, key, role))

        def register(load: Load) -> Load:
            bound = Depends(_bound(load))

            async def html(request: Request, caller: Caller, load: Callable[[], Awaitable[Any]] = bound) -> Response:
                is_part = "hx-request" in request.headers
                which = (request.url.path, request.url.query, caller.user, caller.role, caller.groups, is_part)
                making = self._cache.get(
                    (*which, session_of(request.scope)),
                    lambda: self._make(request, caller, load, template, title, is_part=is_part, live=live),
                )
                made = await cancel_on_disconnect(request, making)
                return _compressed(request, made)

            async def twin(request: Request, load: Callable[[], Coroutine[Any, Any, Any]] = bound) -> JSONResponse:
                return JSONResponse(jsonable_encoder(await cancel_on_disconnect(request, load())))

            checks = [Depends(reject_unknown_parameters)]
            json_path = "/now.json" if path == "/" else f"{path}.json"
            # First: a path that ends in what was asked for would take this for a part of that.
            self.router.add_api_route(json_path, twin, operation_id=operation, dependencies=checks)
            self.router.add_api_route(path, html, operation_id=operation, dependencies=checks)
            return load

        return register

    async def _make(
        self,
        request: Request,
        caller: Identity,
        load: Callable[[], Awaitable[Any]],
        template: str,
        title: str,
        *,
        is_part: bool,
        live: bool,
    ) -> bytes:
        version, now = self.changes.version, self.engine.clock()
        view = await load()
        context = self._context(request, caller) | {
            "view": view,
            "title": title,
            "now": now,
            "events": with_query("/events", since=version) if live else "",
            "layout": "part.html" if is_part else "base.html",
        }
        began = time.thread_time()
        page, seconds = await to_thread(_timed, template, context)
        self.changes.spent(seconds + time.thread_time() - began)
        return page

    def _context(self, request: Request, caller: Identity | None) -> dict[str, Any]:
        """Return what every page may need beside its own view."""
        path, query = request.url.path, f"?{request.url.query}" if request.url.query else ""
        return {
            "path": path,
            "here": path + query,
            "twin": ("/now.json" if path == "/" else f"{path}.json") + query,
            "links": [link for link in self.links if caller is not None and caller.has_role(link.role)],
            "caller": caller,
            "is_operator": caller is not None and caller.has_role(Role.OPERATOR),
            "is_admin": caller is not None and caller.has_role(Role.ADMIN),
            "csrf": csrf_token(request),
        }

    def plain(self, request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
        """A page that is not live: what was refused, or the login."""
        common = self._context(request, identity_of(request.scope))
        common |= {"layout": "plain.html", "now": self.engine.clock(), "events": ""}
        return HTMLResponse(render(template, common | context), status, HEADERS)

    def show_problem(self, request: Request, status: int, told: dict[str, Any]) -> Response:
        """What is wrong, as a page; who is not logged in is asked to."""
        if status == 401:
            login = with_query("/login", next=request.url.path + (f"?{request.url.query}" if request.url.query else ""))
            if "hx-request" in request.headers:
                return Response(status_code=401, headers={"HX-Redirect": login})
            return RedirectResponse(login, 303)
        if "hx-request" in request.headers:
            return self.plain(request, "problem_part.html", status, problem=told, title=told["title"])
        return self.plain(request, "problem.html", status, problem=told, title=told["title"])

    # Actions

    def action(self, path: str, *, operation: str) -> Callable[[Act], Act]:
        """Make a function what a form of a page does (``POST``): it returns where to go then, a path of ours."""

        def register(act: Act) -> Act:
            bound = Depends(_bound(act))

            async def post(request: Request, act: Callable[[], Awaitable[str]] = bound) -> Response:
                where = await act()
                self._cache.clear()
                if "hx-request" in request.headers:
                    return Response(status_code=204, headers={"HX-Redirect": where})
                return RedirectResponse(where, 303)

            self.router.add_api_route(
                path, post, methods=["POST"], operation_id=operation, dependencies=[Depends(sent_form)]
            )
            return act

        return register


def _bound(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """A dependency that takes the same parameters, and calls nothing yet."""

    @wraps(function)
    async def bound(**given: Any) -> Callable[[], Awaitable[Any]]:
        return partial(function, **given)

    return bound


def _timed(template: str, context: dict[str, Any]) -> tuple[bytes, float]:
    began = time.thread_time()
    page = gzip.compress(render(template, context).encode(), 5, mtime=0)
    return page, time.thread_time() - began


def _compressed(request: Request, page: bytes) -> Response:
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers = HEADERS | {"Content-Encoding": "gzip", "Vary": "Accept-Encoding, HX-Request"}
        return Response(page, 200, headers, "text/html; charset=utf-8")
    return HTMLResponse(gzip.decompress(page), 200, HEADERS)


def csrf_token(request: Request) -> str:
    """What a form of ours says that no page of others can know; empty where no browser is logged in."""
    session = session_of(request.scope)
    return sha256(f"form {session}".encode()).hexdigest() if session else ""


async def read_form(request: Request) -> Form:
    """``UsageError`` for what is no form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise UsageError("a form is wanted", field="Content-Type", value=kind)
    try:
        text = (await request.body()).decode()
        found = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise UsageError("the form cannot be read", field="body") from error
    return Form(dict(found))


async def sent_form(request: Request) -> Form:
    """The form of a browser that is logged in; ``ForbiddenError`` where no page of ours has made it."""
    form = await read_form(request)
    expected = csrf_token(request)
    if not expected or not compare_digest(form.get("csrf").encode(), expected.encode()):
        raise ForbiddenError("this form is of another login, or of none", field="csrf", hint="load the page again")
    return form


SentForm = Annotated[Form, Depends(sent_form)]
"""What a form said; for actions."""
