"""The answers to "why?": ``koala explain``, and ``koala submit --dry-run``."""

import os

from koalapy.cli.jobs.resubmit import command_for
from koalapy.cli.jobs.submission import in_terms_of_options
from koalapy.cli.jobs.what_if import span
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Job, print_answer
from koalapy.cli.terminal.progress import waiting_for
from koalapy.cli.terminal.tables import moment_text, table
from koalapy.client.client import Client, Json
from koalapy.client.errors import CliError, printable

MAX_HISTORY_LINES = 10
"""Lines of the history that are shown; ``--json`` has more."""


def explain(job: Job, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Why a job waits, and what would start it now; or why it is where it is.

    IDLE are the nodes that this job could be given, of all; LACKS is how many more would do on that cluster alone.
    """
    found = daemon.client().get(f"/api/v1/jobs/{job}/explain")
    print_answer(found, as_json, page)


def dry_run(client: Client, body: Json, options: Json, *, as_json: bool) -> None:
    """Show what would become of a submission; nothing is submitted."""
    try:
        found = client.post("/api/v1/explain", body)
    except CliError as error:
        raise in_terms_of_options(error, body, options) from error
    found["expected"] = _expected(client, body)
    print_answer(found, as_json, page)


def _expected(client: Client, body: Json) -> Json:
    """When it would start, or why that is not known: which is no reason not to tell the rest."""
    try:
        with waiting_for("simulates"):
            return client.post("/api/v1/forecast", body)
    except CliError as error:
        unknown = dict.fromkeys(("starts", "ends", "not_run"))
        return {"at_once": False, **unknown, "basis": "", "why": error.message}


def page(found: Json) -> str:
    """The binding reason first, then the clusters, the queue, the way out, and the history."""
    parts = [_headline(found)]
    if found["clusters"]:
        parts.append(_clusters(found["clusters"]))
    facts = _facts(found)
    if facts:
        width = max(len(name) for name, _ in facts)
        parts.append("\n".join(f"{name.rjust(width)}  {printable(text)}" for name, text in facts))
    change = found["smallest_change"]
    if change is not None:
        parts.append(_way_out(change, found["job"]))
    if found["reasons"]:
        parts.append(_history(found["reasons"]))
    return "\n\n".join(parts)


def _headline(found: Json) -> str:
    if found["job"] is None:
        said = found["headline"] if found["state"] == "placed" else f"would wait: {found['headline']}"
        return printable(said)
    if found["state"] == "queued":
        said = found["headline"]
        waits = said if said.startswith("waits ") else f"waits: {said}"
        return printable(f"job {found['job']} {waits}")
    return printable(f"job {found['job']}: {found['headline']}")


def _clusters(clusters: list[Json]) -> str:
    placed = any(cluster["gives"] for cluster in clusters)
    lacking = any(cluster["missing"] for cluster in clusters)
    header = ["CLUSTER", "STATE", "IDLE", *(["NODES"] if placed else []), *(["LACKS"] if lacking else []), "WHY"]
    rows = []
    for cluster in clusters:
        row = [cluster["cluster"], cluster["state"], f"{cluster['idle']}/{cluster['total']}"]
        row += [cluster["gives"] or "-"] if placed else []
        row += [cluster["missing"] or "-"] if lacking else []
        rows.append([*row, cluster["reason"] or "-"])
    return table(header, rows)


def _facts(found: Json) -> list[tuple[str, str]]:
    facts = []
    if expected := found.get("expected"):
        facts.append(("starts", _start(expected)))
    if found["placement"] is not None and found["placement"]["reason"]:
        facts.append(("why there", found["placement"]["reason"]))
    facts += [("note", note) for note in found["notes"]]
    if found["position"] is not None:
        ahead = "the head of its queue" if found["ahead"] == 0 else f"{found['ahead']} before it in its queue"
        facts.append(("position", f"{found['position']}, {ahead}"))
    if found["job"] is not None:
        facts.append(("tries", str(found["tries"])))
    if found["suffices"]:
        facts.append(("suffices", ", or ".join(found["suffices"])))
    return facts


def _start(expected: Json) -> str:
    if expected["at_once"]:
        return "at once"
    if expected["starts"] is None:
        return f"not known: {expected['why']}"
    return f"in {span(expected['starts'])}, by {expected['basis']}"


def _way_out(change: Json, job: int | None) -> str:
    """The smallest change, as a command where there is one for it."""
    where: dict[str, int] = {}
    for component in change["placement"]["components"]:
        where[component["cluster"]] = where.get(component["cluster"], 0) + component["size"]
    sites = ", ".join(f"{name}:{size}" for name, size in where.items())
    said = printable(f"would start now: {change['text']} ({sites})")
    command = command_for(change["submission"], os.getcwd())
    if command is None:
        which = "koala explain --json" if job is None else f"koala explain {job} --json"
        return f"{said}\n  {which} has the whole submission, for koala submit -f"
    # The new job takes the place of the old one, which may be just what keeps it from starting.
    return f"{said}\n  {command}" if job is None else f"{said}\n  koala cancel {job} && {command}"


def _history(reasons: list[Json]) -> str:
    rows = [[moment_text(reason["at"]), reason["event"], reason["reason"]] for reason in reasons[-MAX_HISTORY_LINES:]]
    return table(["TIME (UTC)", "EVENT", "WHY"], rows)
