"""The files that are brought to a job's components, in lines for people."""

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
"""Characters."""
POLL_INTERVAL = 0.5
"""Seconds between two looks at a job whose files are on their way."""
UNDER_WAY = ("queued", "held", "placed", "claiming", "unknown")
"""States of a job in which files may still be brought."""


def has_stages(job: Job) -> bool:
    """Whether files may be brought to any of its components."""
    own = any(component.get("inputs") for component in job["request"].get("components", ()))
    return bool(own or job["inputs"] or job["bundle"])


def lines(job: Job, *, unicode: bool) -> list[str]:
    """A line for each component to which files are brought, or were."""
    staged = [
        (printable(f"{i} {c['cluster']}"), c)
        for i, c in enumerate(job["components"])
        if c["staging_since"] and (c["stage_size"] or c["staged_at"] is None)
    ]
    width = max((cell_len(where) for where, _ in staged), default=0)
    return [f"{left(where, width)}  {printable(_progress(job, c, unicode))}" for where, c in staged]


def _progress(job: Job, component: Component, unicode: bool) -> str:
    """``120 of 200 MB from north, 45 MB/s`` with a bar, or how long it took."""
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
    """``120 of 200 MB``, or with both units where they differ."""
    (some, unit), (everything, whole) = format_bytes(there).split(" "), format_bytes(size).split(" ")
    return f"{some} of {everything} {whole}" if unit == whole else f"{some} {unit} of {everything} {whole}"


def _speed(size: int, seconds: float) -> str:
    return f", {format_bytes(size / seconds)}/s" if size and seconds >= 0.05 else ""


def _bar(fraction: float, unicode: bool) -> str:
    full = int(min(1.0, fraction) * BAR_COLUMNS)
    return "[" + ("█" if unicode else "#") * full + ("░" if unicode else ".") * (BAR_COLUMNS - full) + "]"


def follow(client: Client, job: int, deadline: float | None = None) -> None:
    """Show on standard error how far a job's files are, until they are all there or the job is over.

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
