"""``/openapi.json``, and the page at ``/docs``, which says the same for people; it loads nothing and runs nothing."""

import asyncio
import base64
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment, PackageLoader, Template

from koalapy.api.middleware import NOTHING

Json = dict[str, Any]
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code { background: #eee; padding: 0 .2em; } summary { cursor: pointer; } details { margin: .3rem 0; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid #ccc; padding: .2rem .6rem; text-align: left; }
@media (prefers-color-scheme: dark) {
    body { background: #111; color: #ddd; } code { background: #333; } a { color: #8bf; }
}
""".replace("\n", "")
HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {"Content-Security-Policy": f"{NOTHING}; style-src 'sha256-{HASH}'"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "maxLength": "up to", "format": "of format"}


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("koalapy.api"), autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    return environment.get_template("docs.html")


def docs_router(document: Callable[[], Json]) -> APIRouter:
    """``document`` makes the OpenAPI document: once, for half a second, and anybody may be the first to ask for it. So
    that is done by another thread, one at a time."""
    router, making = APIRouter(), asyncio.Lock()

    async def made() -> Json:
        async with making:
            return await asyncio.to_thread(document)

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(await made())

    @router.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_template().render(await made(), bounds=BOUNDS, style=STYLE), headers=HEADERS)

    return router
