"""Rendering of pages by Jinja, with filters for values and the static files that pages load."""

import gzip
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from koalapy import __version__
from koalapy.dashboard.grid_map import lay_out_map
from koalapy.dashboard.time_range import RANGES
from koalapy.dashboard.timeline import MEANINGS
from koalapy.model import wording
from koalapy.model.job_search import KINDS, format_term

TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
MANIFEST = "vendor/manifest.json"
"""List of third-party files: package, version, licence and SHA-256."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A static file of the dashboard."""

    type: str
    content: bytes
    compressed: bytes
    digest: str


@cache
def load_page_files() -> dict[str, PageFile]:
    """Return the static files by path; raise ``ValueError`` if a third-party file differs from the manifest."""
    root = resources.files("koalapy.dashboard") / "static"
    vendored = {f"vendor/{entry['file']}": entry["sha256"] for entry in json.loads((root / MANIFEST).read_text())}
    files = {}
    for prefix, folder in (("", root), ("vendor/", root / "vendor")):
        for path in folder.iterdir():
            name = prefix + path.name
            content_type = TYPES.get(PurePosixPath(name).suffix)
            if content_type is None or not path.is_file():
                continue
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if prefix and vendored.get(name) != digest:
                raise ValueError(f"{name} differs from {MANIFEST}; reinstall koalapy")
            files[name] = PageFile(content_type, content, gzip.compress(content, mtime=0), digest[:16])
    return files


def file_url(name: str) -> str:
    """Return the path of a static file, which changes with its content."""
    return f"/static/{load_page_files()[name].digest}/{name}"


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""Pages load and run only the daemon's own files."""
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "same-origin"}
"""Browsers send the origin of a form only under this referrer policy."""


def render_time(timestamp: float | None, *, exact: bool = True) -> Markup:
    """Return a time to the second or the minute as a ``time`` element, ``–`` for None. Its text is in UTC until a
    script converts it to the viewer's zone."""
    if (iso_time := format_iso_time(timestamp)) is None or timestamp is None:
        return Markup("–")
    text = wording.format_time(timestamp, time.time(), exact=exact)
    style = "" if exact else ' class="minute"'
    return Markup(f'<time{style} datetime="{iso_time}" title="{iso_time[:10]} {iso_time[11:19]} UTC">{text}</time>')


def format_iso_time(timestamp: float | None) -> str | None:
    """Format a time as ISO 8601 in UTC; None for None."""
    return None if timestamp is None else datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def render_iso_time(text: str | None) -> Markup:
    """Return an ISO 8601 time as a ``time`` element, ``–`` for None."""
    return render_time(None if text is None else datetime.fromisoformat(text).timestamp())


def render_age(timestamp: float | None, now: float) -> Markup:
    """Return the time since ``timestamp`` as an element that a script keeps up to date."""
    if (iso_time := format_iso_time(timestamp)) is None or timestamp is None:
        return Markup("never")
    text = wording.format_duration(max(0.0, now - timestamp))
    return Markup(
        f'<time class="age" datetime="{iso_time}" title="since {iso_time[:10]} {iso_time[11:19]} UTC">{text}</time>'
    )


def state_badge(state: str, style: str = "") -> Markup:
    """Return a state as an element; ``style``: the state that gives its colour, by default itself."""
    return Markup(f'<span class="state {escape(style or state)}">{escape(state)}</span>')


def with_query(path: str, **query: object) -> str:
    """Return a path with a query of the values that are not empty."""
    parameters = {name: value for name, value in query.items() if value not in (None, "", [])}
    text = urlencode(parameters, doseq=True)
    return f"{path}?{text}" if text else path


def identifier(text: str) -> str:
    """Return a text as the id of an HTML element."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)


def format_count(number: float | None) -> str:
    """Format a number with thousands separators: ``20,000``; ``–`` for None."""
    return "–" if number is None else f"{number:,}"


def format_percent(share: float) -> str:
    """Format a percentage, below 10 % with a decimal."""
    return f"{share:.{0 if share >= 10 or not share else 1}f} %"


def format_quantity(number: float) -> str:
    """Format a number with thousands separators, and decimals only if it has any: ``1,250``, ``0.5``."""
    return f"{int(number):,}" if float(number).is_integer() else f"{number:,.6g}"


def format_size(size: float | None) -> str:
    """Format a number of bytes with a unit, ``–`` for None."""
    return "–" if size is None else wording.format_bytes(size)


def format_seconds(span: float | None) -> str:
    """Format a short duration: ``0.8 ms``, ``120 ms``, ``2.5 s``; ``–`` for None."""
    if span is None:
        return "–"
    if span < 1:
        return f"{span * 1000:.2g} ms" if span < 0.01 else f"{span * 1000:.0f} ms"
    return f"{span:.1f} s" if span < 60 else wording.format_duration(span)


def format_rate(bandwidth: float | None) -> str:
    """Format bytes per second: ``117 MB/s``; ``–`` for None."""
    if bandwidth is None:
        return "–"
    number = bandwidth * 1e-6
    return f"{number:,.0f} MB/s" if number >= 1000 else f"{wording.format_three_digits(number)} MB/s"


def _make_environment() -> Environment:
    """Return the environment of all templates: their filters and functions. A variable without a value is an error."""
    environment = Environment(
        loader=PackageLoader("koalapy.dashboard"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "default": asdict}
    environment.filters |= {
        "age": render_age,
        "count": format_count,
        "quantity": format_quantity,
        "iso": format_iso_time,
        "iso_time": render_iso_time,
        "days": wording.format_days,
        "duration": wording.format_duration,
        "identifier": identifier,
        "shorten": wording.shorten,
        "time": render_time,
        "time_text": wording.format_time,
        "hosts": wording.format_hosts,
        "nodes": wording.format_nodes,
        "rate": format_rate,
        "seconds": format_seconds,
        "quoted": lambda text: quote(str(text), safe=""),
        "size": format_size,
        "state": state_badge,
    }
    environment.globals |= {
        "cpu_use": wording.format_cpu_use,
        "file": file_url,
        "format_term": format_term,
        "lane_meanings": MEANINGS,
        "lay_out_map": lay_out_map,
        "memory_use": wording.format_memory_use,
        "percent": format_percent,
        "search_kinds": KINDS,
        "tenth": "{:.1f}".format,
        "time_ranges": tuple(RANGES),
        "version": __version__,
        "whole": "{:,.0f}".format,
        "with_query": with_query,
    }
    return environment


ENVIRONMENT = _make_environment()


def render(template: str, context: Mapping[str, Any]) -> str:
    """Render a template of ``templates/`` with its variables."""
    return ENVIRONMENT.get_template(template).render(context)
