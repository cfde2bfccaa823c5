"""``koala what-if``: what will become of those who wait, as it is or if something was otherwise."""

from typing import Annotated

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.progress import waiting_for
from koalapy.cli.terminal.tables import table
from koalapy.client.client import Json
from koalapy.model.wording import days, duration

MAX_LINES = 20
"""Jobs that are shown; ``--json`` has all."""


def what_if(
    policy: Annotated[str, Option(help="another policy, of all that wait", completes="policies")] = "",
    rule: Annotated[list[str] | None, Option(help="another rule, as queue=fcfs")] = None,
    drain: Annotated[list[str] | None, Option(help="a cluster that takes no more", completes="clusters")] = None,
    resume: Annotated[list[str] | None, Option(help="a drained one that does", completes="clusters")] = None,
    add: Annotated[list[str] | None, Option(help="a new cluster and its nodes, as west=64")] = None,
    first: Annotated[int | None, Option(help="a job that comes before all others of its priority", min=1)] = None,
    walltime: Annotated[list[str] | None, Option(help="of a job that waits, as 17=90m")] = None,
    horizon: Annotated[str, Option(help="how far to look ahead, as 24h")] = "30d",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """When will those who wait start, and when if something was otherwise? koala what-if --drain north

    The grid is simulated from this moment on, again and again, with run times as such jobs had them: of ten cases one
    lies below, and one above each interval. Nothing is changed. For operators.
    """
    body = {
        "policy": policy,
        "rules": rule or [],
        "drain": drain or [],
        "resume": resume or [],
        "add": add or [],
        "first": first,
        "walltimes": walltime or [],
        "horizon": horizon,
    }
    with waiting_for("simulates"):
        found = daemon.client().post("/api/v1/what-if", body, patient=True)
    print_answer(found, as_json, _page)


def _page(found: Json) -> str:
    ways = [("as it is", found["as_it_is"]), *([("changed", found["changed"])] if found["changed"] else [])]
    rows = [
        [way, _number(told["started"]), span(told["mean_wait"]), span(told["mean_response"]), told["draws"]]
        for way, told in ways
    ]
    parts = [table(("", "START", "MEAN WAIT", "UNTIL THEY END", "SIMULATIONS"), rows)]
    horizon = found["as_it_is"]["horizon"]
    waiting = [job for job in found["as_it_is"]["jobs"] if job["state"] == "queued"]
    if not waiting:
        return "\n\n".join(["Nobody waits.", *parts[1:]])
    later = {job["job"]: job for job in found["changed"]["jobs"]} if found["changed"] else {}
    head = ("JOB", "STARTS IN", *(("CHANGED",) if later else ()), "RUN TIME BY")
    lines = [
        [
            job["job"],
            _starts(job, horizon),
            *((_starts(later.get(job["job"]), horizon),) if later else ()),
            job["basis"],
        ]
        for job in waiting[:MAX_LINES]
    ]
    parts.append(table(head, lines))
    if len(waiting) > MAX_LINES:
        parts.append(f"and {len(waiting) - MAX_LINES} more; --json tells all")
    return "\n\n".join(parts)


def _starts(job: Json | None, horizon: float) -> str:
    return "-" if job is None else f"not in {days(horizon)}" if job["starts"] is None else span(job["starts"])


def _number(interval: Json | None) -> str:
    """As ``span``, of jobs."""
    if interval is None:
        return "-"
    low, middle, high = (f"{interval[name]:.0f}" for name in ("low", "middle", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


def span(interval: Json | None) -> str:
    """The middle of an interval, and between which bounds it lies."""
    if interval is None:
        return "-"
    low, middle, high = (duration(interval[name]) for name in ("low", "middle", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"
