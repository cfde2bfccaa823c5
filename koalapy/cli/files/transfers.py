"""Progress of the file transfers to a job's components, as lines of text."""

import sys
import time
from datetime import UTC, datetime

from rich.cells import cell_len

from koalapy.cli.terminal.screen import Block
from koalapy.cli.terminal.tables import seconds_since
from koalapy.cli.terminal.width import align_left
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


def has_transfers(job: Job) -> bool:
    """Return whether files may be transferred to a component of the job."""
    has_inputs = any(component.get("inputs") for component in job["request"].get("components", ()))
    return bool(has_inputs or job["inputs"] or job["result_inputs"] or job["bundle"])


def transfer_lines(job: Job, *, unicode: bool) -> list[str]:
    """Return a line for each component with current or completed transfers."""
    staged = [
        (printable(f"{i} {c['cluster']}"), c)
        for i, c in enumerate(job["components"])
        if c["staging_since"] and (c["stage_size"] or c["staged_at"] is None)
    ]
    width = max((cell_len(label) for label, _ in staged), default=0)
    return [f"{align_left(label, width)}  {printable(_progress_text(job, c, unicode))}" for label, c in staged]


def _progress_text(job: Job, component: Component, unicode: bool) -> str:
    """Return the progress of a component's transfers with a bar, or their duration if they are complete.

    For example ``120 of 200 MB from north, 45 MB/s``.
    """
    size, staged = component["stage_size"], component["staged"]
    remote_sources = sorted({source for source in component["sources"] if source != component["cluster"]})
    origin = f" from {', '.join(remote_sources)}" if remote_sources else ""
    since = component["staging_since"] or ""
    if component["staged_at"]:
        took = seconds_since(since, component["staged_at"])
        return f"{format_bytes(size)}{origin} in {took:.3g} s{_format_speed(size, took)}"
    if not size:
        return f"waits for its files{origin}"
    now = job["ended_at"] or datetime.now(UTC).isoformat()
    passed = seconds_since(since, now)
    return f"{_draw_bar(staged / size, unicode)} {_format_share(staged, size)}{origin}{_format_speed(staged, passed)}"


def _format_share(staged: int, size: int) -> str:
    """Return two sizes as text: ``120 of 200 MB``, or each with its unit if the units differ."""
    (staged_number, staged_unit), (total_number, total_unit) = (
        format_bytes(staged).split(" "),
        format_bytes(size).split(" "),
    )
    return (
        f"{staged_number} of {total_number} {total_unit}"
        if staged_unit == total_unit
        else f"{staged_number} {staged_unit} of {total_number} {total_unit}"
    )


def _format_speed(size: int, seconds: float) -> str:
    return f", {format_bytes(size / seconds)}/s" if size and seconds >= 0.05 else ""


def _draw_bar(fraction: float, unicode: bool) -> str:
    full = int(min(1.0, fraction) * BAR_COLUMNS)
    return "[" + ("█" if unicode else "#") * full + ("░" if unicode else ".") * (BAR_COLUMNS - full) + "]"


def follow_transfers(client: Client, job: int, deadline: float | None = None) -> None:
    """Show the progress of a job's transfers on standard error, until they are complete or the job has ended.

    Raise ``TimeIsUp`` at ``deadline`` (monotonic seconds).
    """
    with Block(leaves_lines=True) as block:
        while True:
            answer = client.job(job)
            is_waiting = answer["state"] in ("queued", "held")
            if not is_waiting:
                block.draw(transfer_lines(answer, unicode=False))
            elif sys.stderr.isatty():
                block.draw([printable(f"{answer['state']}: {answer['reason']}")])
            is_staging = any(
                component["staging_since"] and not component["staged_at"] for component in answer["components"]
            )
            if answer["state"] not in UNDER_WAY or not has_transfers(answer) or not (is_waiting or is_staging):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeIsUp
            client.timeouts.sleep(POLL_INTERVAL)
