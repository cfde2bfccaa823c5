"""Progress of the file transfers to a job's components, as lines of text."""

import sys
import time
from datetime import UTC, datetime

from rich.cells import cell_len

from koalapy.cli.terminal.screen import Block
from koalapy.cli.terminal.tables import seconds_since
from koalapy.cli.terminal.width import left
from koalapy.client.answers import Component, Job
from koalapy.client.client import Client
from koalapy.client.errors import printable
from koalapy.client.timeouts import TimeIsUp
from koalapy.model.wording import format_bytes

BAR_COLUMNS = 20
"""Width of a progress bar in characters."""
POLL_INTERVAL = 0.5
"""Seconds between two requests for a job during its transfers."""
UNDER_WAY = ("queued", "held", "placed", "claiming", "unknown")
"""States of a job in which files may still be transferred."""


def has_stages(job: Job) -> bool:
    """Return whether files may be transferred to a component of the job."""
    own = any(component.get("inputs") for component in job["request"].get("components", ()))
    return bool(own or job["inputs"] or job["bundle"])


def lines(job: Job, *, unicode: bool) -> list[str]:
    """Return a line for each component with current or completed transfers."""
    staged = [
        (printable(f"{i} {c['cluster']}"), c)
        for i, c in enumerate(job["components"])
        if c["staging_since"] and (c["stage_size"] or c["staged_at"] is None)
    ]
    width = max((cell_len(where) for where, _ in staged), default=0)
    return [f"{left(where, width)}  {printable(_progress(job, c, unicode))}" for where, c in staged]


def _progress(job: Job, component: Component, unicode: bool) -> str:
    """Return the progress of a component's transfers with a bar, or their duration if they are complete.

    For example ``120 of 200 MB from north, 45 MB/s``.
    """
    size, there = component["stage_size"], component["staged"]
    away = sorted({source for source in component["sources"] if source != component["cluster"]})
    where = f" from {', '.join(away)}" if away else ""
    since = component["staging_since"] or ""
    if component["staged_at"]:
        took = seconds_since(since, component["staged_at"])
        return f"{format_bytes(size)}{where} in {took:.3g} s{_speed(size, took)}"
    if not size:
        return f"waits for its files{where}"
    now = job["ended_at"] or datetime.now(UTC).isoformat()
    passed = seconds_since(since, now)
    return f"{_bar(there / size, unicode)} {_of(there, size)}{where}{_speed(there, passed)}"


def _of(there: int, size: int) -> str:
    """Return two sizes as text: ``120 of 200 MB``, or each with its unit if the units differ."""
    (some, unit), (everything, whole) = format_bytes(there).split(" "), format_bytes(size).split(" ")
    return f"{some} of {everything} {whole}" if unit == whole else f"{some} {unit} of {everything} {whole}"


def _speed(size: int, seconds: float) -> str:
    return f", {format_bytes(size / seconds)}/s" if size and seconds >= 0.05 else ""


def _bar(fraction: float, unicode: bool) -> str:
    full = int(min(1.0, fraction) * BAR_COLUMNS)
    return "[" + ("█" if unicode else "#") * full + ("░" if unicode else ".") * (BAR_COLUMNS - full) + "]"


def follow(client: Client, job: int, deadline: float | None = None) -> None:
    """Show the progress of a job's transfers on standard error, until they are complete or the job has ended.

    Raise ``TimeIsUp`` at ``deadline`` (monotonic seconds).
    """
    with Block(leaves_lines=True) as block:
        while True:
            found = client.job(job)
            is_waiting = found["state"] in ("queued", "held")
            if not is_waiting:
                block.draw(lines(found, unicode=False))
            elif sys.stderr.isatty():
                block.draw([printable(f"{found['state']}: {found['reason']}")])
            is_staging = any(each["staging_since"] and not each["staged_at"] for each in found["components"])
            if found["state"] not in UNDER_WAY or not has_stages(found) or not (is_waiting or is_staging):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeIsUp
            client.timeouts.sleep(POLL_INTERVAL)
