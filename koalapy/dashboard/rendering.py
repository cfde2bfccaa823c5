"""HTML of what pages tell: Jinja with the words and forms that all pages share, and the files that pages load."""

import gzip
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from koalapy import __version__
from koalapy.dashboard.pictures import MEANINGS, bar, distribution, interval, job_lanes, node_grid, series
from koalapy.model.job_search import format_term
from koalapy.model.wording import (
    format_bytes,
    format_days,
    format_duration,
    format_nodes,
    format_three_digits,
    format_time,
)

TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
MANIFEST = "vendor/manifest.json"
"""What others wrote: package, version, licence, and SHA-256 of each file."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """``name`` below ``static``."""

    name: str
    type: str
    content: bytes
    compressed: bytes
    digest: str


@cache
def load_page_files() -> dict[str, PageFile]:
    """By their names; ``ValueError`` where one that others wrote is not what the manifest says."""
    root = resources.files("koalapy.dashboard") / "static"
    vendored = {f"vendor/{entry['file']}": entry["sha256"] for entry in json.loads((root / MANIFEST).read_text())}
    found = {}
    for folder, names in (("", root), ("vendor/", root / "vendor")):
        for each in names.iterdir():
            name = folder + each.name
            kind = TYPES.get(PurePosixPath(name).suffix)
            if kind is None or not each.is_file():
                continue
            content = each.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if folder and vendored.get(name) != digest:
                raise ValueError(f"{name} is not what {MANIFEST} says")
            found[name] = PageFile(name, kind, content, gzip.compress(content, mtime=0), digest[:16])
    return found


def url_of(name: str) -> str:
    """Where a page finds a file: another place whenever its content is another."""
    return f"/static/{load_page_files()[name].digest}/{name}"


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from elsewhere, and nothing runs that is no file of ours."""
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "same-origin"}
"""Browsers tell with a form where it comes from only by this referrer policy."""

PICTURES = (bar, distribution, interval, job_lanes, node_grid, series)
"""Templates know them by their names."""


def moment(at: float | None) -> Markup:
    """A moment, to the second and in UTC, for people and for scripts."""
    if at is None:
        return Markup("–")
    told = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        told.strftime("%Y-%m-%dT%H:%M:%SZ"), format_time(at, time.time(), exact=True)
    )


def clocked(told: str | None) -> Markup:
    """``moment`` of what the REST API tells as text."""
    return moment(None if told is None else datetime.fromisoformat(told).timestamp())


def age(at: float | None, now: float) -> Markup:
    """How long ago something was; a script keeps it true while the page is shown."""
    if at is None:
        return Markup("never")
    told = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Markup('<time class="age" datetime="{}">{}</time>').format(told, format_duration(max(0.0, now - at)))


def with_query(path: str, **query: object) -> str:
    """An address with what is not empty of a query."""
    told = urlencode({name: value for name, value in query.items() if value not in (None, "")})
    return f"{path}?{told}" if told else path


def identifier(text: str) -> str:
    """A text as the id of an element."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)


def size(count: float | None) -> str:
    """Bytes, as commands tell them."""
    return "–" if count is None else format_bytes(count)


def seconds(span: float | None) -> str:
    """A short span: ``0.8 ms``, ``120 ms``, ``2.5 s``."""
    if span is None:
        return "–"
    if span < 1:
        return f"{span * 1000:.2g} ms" if span < 0.01 else f"{span * 1000:.0f} ms"
    return f"{span:.1f} s" if span < 100 else format_duration(span)


def rate(bandwidth: float | None) -> str:
    """Bytes per second: ``117 MB/s``."""
    return "–" if bandwidth is None else f"{format_three_digits(bandwidth * 1e-6)} MB/s"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("koalapy.dashboard"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "age": age,
        "clocked": clocked,
        "days": format_days,
        "duration": format_duration,
        "identifier": identifier,
        "moment": moment,
        "nodes": format_nodes,
        "rate": rate,
        "seconds": seconds,
        "quoted": lambda text: quote(str(text), safe=""),
        "size": size,
    }
    environment.globals |= {
        "file": url_of,
        "version": __version__,
        "with_query": with_query,
        "format_term": format_term,
    }
    environment.globals |= {"lane_meanings": MEANINGS}
    environment.globals |= {picture.__name__: picture for picture in PICTURES}
    environment.globals |= {"rate": rate, "seconds": seconds}
    return environment


_ENVIRONMENT = _environment()


def render(template: str, context: Mapping[str, Any]) -> str:
    """A template of ``templates/`` with what it is to tell."""
    return _ENVIRONMENT.get_template(template).render(context)
