"""``koala explain``, ``submit --dry-run`` and ``what-if``: the reasons why a job waits, and its expected start."""

import os
from collections.abc import Callable
from typing import Annotated

from koalapy.cli.jobs.jobs import LastJob, find_job
from koalapy.cli.jobs.submission import NO_LINES, ScriptLines, in_terms_of_options
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.screen import waiting_for
from koalapy.cli.terminal.tables import format_moment, format_table
from koalapy.client.client import Client
from koalapy.client.errors import GridError, printable
from koalapy.client.http import Json
from koalapy.client.tables import explain_headline
from koalapy.model.command_line import command_for
from koalapy.model.wording import format_days, format_duration

MAX_LINES = 20
"""Maximum number of jobs in the table; ``--json`` prints all."""


def what_if(
    policy: Annotated[str, Option(help="placement policy of all waiting jobs", completes="policies")] = "",
    rule: Annotated[list[str] | None, Option(help="changed scheduling rule, e.g. queue=fcfs; repeatable")] = None,
    drain: Annotated[list[str] | None, Option(help="cluster to drain; repeatable", completes="clusters")] = None,
    resume: Annotated[
        list[str] | None, Option(help="drained cluster to resume; repeatable", completes="clusters")
    ] = None,
    add: Annotated[list[str] | None, Option(help="additional cluster and its nodes, e.g. west=64; repeatable")] = None,
    first: Annotated[int | None, Option(help="waiting job to put first in its queue", min=1)] = None,
    walltime: Annotated[
        list[str] | None, Option(help="changed walltime of a waiting job, e.g. 17=90m; repeatable")
    ] = None,
    horizon: Annotated[str, Option(help="how far to look ahead, e.g. 24h")] = "30d",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Predict when waiting jobs will start, now and under a change: koala what-if --drain north

    Simulates the grid from now on many times, with run times drawn from earlier jobs. Of ten cases, one is below and
    one above each interval. Nothing is changed. For operators.
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
        forecast = daemon.client().post("/api/v1/what-if", body, patient=True)
    print_answer(forecast, as_json, _format_forecast)


def _format_forecast(forecast: Json) -> str:
    """Return the page of a simulation: mean times, and the expected start of each waiting job."""
    outcomes = [
        ("as it is", forecast["as_it_is"]),
        *([("changed", forecast["changed"])] if forecast["changed"] else []),
    ]
    rows = [
        [
            label,
            format_interval(outcome["started"], "{:.0f}".format),
            format_interval(outcome["mean_wait"]),
            format_interval(outcome["mean_response"]),
            outcome["draws"],
        ]
        for label, outcome in outcomes
    ]
    parts = [format_table(("", "START", "MEAN WAIT", "UNTIL THEY END", "SIMULATIONS"), rows)]
    horizon = min(outcome["horizon"] for _, outcome in outcomes)
    parts += dict.fromkeys(f"Note: {outcome['note']}." for _, outcome in outcomes if outcome["note"])
    waiting = [job for job in forecast["as_it_is"]["jobs"] if job["state"] == "queued"]
    if not waiting:
        return "\n\n".join(["No job waits.", *parts[1:]])
    later = {job["job"]: job for job in forecast["changed"]["jobs"]} if forecast["changed"] else {}

    def start_text(job: Json | None) -> str:
        """Return the time until a job starts, or that it does not start in the simulated time."""
        return (
            "-"
            if job is None
            else f"not in {format_days(horizon)}"
            if job["starts"] is None
            else format_interval(job["starts"])
        )

    head = ("JOB", "STARTS IN", *(("CHANGED",) if later else ()), "RUN TIME FROM")
    lines = [
        [job["job"], start_text(job), *([start_text(later.get(job["job"]))] if later else []), job["basis"]]
        for job in waiting[:MAX_LINES]
    ]
    parts.append(format_table(head, lines))
    if len(waiting) > MAX_LINES:
        parts.append(f"and {len(waiting) - MAX_LINES} more; --json tells all")
    return "\n\n".join(parts)


def format_interval(interval: Json | None, form: Callable[[float], str] = format_duration) -> str:
    """Return an interval as text: its middle and its bounds, each formatted by ``form``."""
    if interval is None:
        return "-"
    low, middle, high = (form(interval[name]) for name in ("low", "middle", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


MAX_HISTORY_LINES = 10
"""Maximum number of history lines; ``--json`` prints more."""


def explain_job(job: LastJob = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Explain why a job waits and what would start it, or why it is where it is.

    IDLE: nodes that this job could get, of all. LACKS: additional idle nodes needed on that cluster alone.
    """
    client = daemon.client()
    explanation = client.get(f"/api/v1/jobs/{find_job(client, job)}/explain")
    print_answer(explanation, as_json, format_explanation)


def dry_run(client: Client, body: Json, options: Json, lines: ScriptLines = NO_LINES, *, as_json: bool) -> None:
    """Print how a job would be handled, without submitting it."""
    try:
        explanation = client.post("/api/v1/explain", body)
    except GridError as error:
        raise in_terms_of_options(error, body, options, lines) from error
    explanation["expected"] = _request_forecast(client, body)
    print_answer(explanation, as_json, format_explanation)


def _request_forecast(client: Client, body: Json) -> Json:
    """Return the expected start of the job, or the reason why it is unknown."""
    try:
        with waiting_for("simulates"):
            return client.post("/api/v1/forecast", body)
    except GridError as error:
        unknown = dict.fromkeys(("starts", "ends", "not_run"))
        return {"at_once": False, **unknown, "basis": "", "why": error.message}


def format_explanation(explanation: Json) -> str:
    """Format an explanation: the binding reason, the clusters, the queue, the smallest change and the history."""
    parts = [printable(explain_headline(explanation))]
    if explanation["clusters"]:
        parts.append(_clusters_table(explanation["clusters"]))
    facts = _list_facts(explanation)
    if facts:
        width = max(len(name) for name, _ in facts)
        parts.append("\n".join(f"{name.rjust(width)}  {printable(text)}" for name, text in facts))
    change = explanation["smallest_change"]
    if change is not None:
        parts.append(_format_change(change))
    if explanation["reasons"]:
        reasons = explanation["reasons"][-MAX_HISTORY_LINES:]
        rows = [[format_moment(reason["at"]), reason["event"], reason["reason"]] for reason in reasons]
        parts.append(format_table(["TIME (UTC)", "EVENT", "WHY"], rows))
    return "\n\n".join(parts)


def _clusters_table(clusters: list[Json]) -> str:
    """Return a table of clusters: nodes that the job could get or lacks there, and why."""
    placed = any(cluster["gives"] for cluster in clusters)
    lacking = any(cluster["missing"] for cluster in clusters)
    header = ["CLUSTER", "STATE", "IDLE", *(["NODES"] if placed else []), *(["LACKS"] if lacking else []), "WHY"]
    rows = []
    for cluster in clusters:
        row = [cluster["cluster"], cluster["state"], f"{cluster['idle']}/{cluster['total']}"]
        row += [cluster["gives"] or "-"] if placed else []
        row += [cluster["missing"] or "-"] if lacking else []
        rows.append([*row, cluster["reason"] or "-"])
    return format_table(header, rows)


def _list_facts(explanation: Json) -> list[tuple[str, str]]:
    """Return the other facts of an explanation as pairs of label and text, in display order."""
    facts = []
    if expected := explanation.get("expected"):
        is_known = expected["starts"] is not None
        start = format_expected_start(expected) if is_known else f"not known: {expected['why']}"
        facts.append(("starts", "at once" if expected["at_once"] else start))
    if explanation["placement"] is not None and explanation["placement"]["reason"]:
        facts.append(("why there", explanation["placement"]["reason"]))
    facts += [("note", note) for note in explanation["notes"]]
    if explanation["position"] is not None:
        ahead = (
            "the head of its queue" if explanation["ahead"] == 0 else f"{explanation['ahead']} before it in its queue"
        )
        facts.append(("position", f"{explanation['position']}, {ahead}"))
    if explanation["job"] is not None:
        facts.append(("tries", str(explanation["tries"])))
    if explanation["suffices"]:
        facts.append(("suffices", ", or ".join(explanation["suffices"])))
    return facts


def format_expected_start(expected: Json) -> str:
    """Return when a job is expected to start, and from what its run time is estimated."""
    return f"in {format_interval(expected['starts'])} (run time from {expected['basis']})"


def _format_change(change: Json) -> str:
    """Return the smallest change as text, with a command if options can express it."""
    sizes: dict[str, int] = {}
    for component in change["placement"]["components"]:
        sizes[component["cluster"]] = sizes.get(component["cluster"], 0) + component["size"]
    sites = ", ".join(f"{name}:{size}" for name, size in sizes.items())
    text = printable(f"would start now: {change['text']} ({sites})")
    if change["command"]:
        return f"{text}\n  {change['command']}"
    command = command_for(change["submission"], os.getcwd())
    if command is None:
        return f"{text}\n  koala submit --dry-run --json has the whole submission, for koala submit -f"
    return f"{text}\n  {command}"
