"""The columns of jobs and clusters in tables of the command line and the Python client."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from koalapy.client.client import name_of, nodes_of
from koalapy.client.http import Json
from koalapy.model.wording import format_duration, format_time

Columns = Mapping[str, Callable[[Json], object]]
"""Headers of a table, and the functions that return the cell of an item."""


def seconds_since(start: str, end: str | None) -> float:
    """Return the seconds from one time of the API to another, or to now if ``end`` is None."""
    until = _parse_time(end) if end else datetime.now(UTC)
    return max(0.0, (until - _parse_time(start)).total_seconds())


def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def format_tasks(tasks: Json) -> str:
    """Return the numbers of an array's tasks: ``16 running, 184 waiting``."""
    counts: Mapping[str, object] = tasks
    states = ("running", "waiting", "succeeded", "failed", "cancelled")
    return ", ".join(f"{counts[state]} {state}" for state in states if counts[state])


def _job_reason(job: Json | Json) -> str:
    """Return why a job waits or how it ended; for an array the numbers of its tasks first."""
    if (tasks := job["tasks"]) is not None:
        reason = job["reason"] if job["state"] in ("queued", "held") and not tasks["running"] else ""
        return format_tasks(tasks) + (f"; {reason}" if reason else "")
    # The last change of a running job is of no interest, except that its nodes are suspended.
    if job["state"] == "running" and not job["reason"].startswith("suspended on "):
        return "-"
    return "-" if job["state"] == "succeeded" else job["reason"] or "-"


def _running_time(job: Json) -> str:
    """Return the running time of the last attempt; a dash for a waiting job."""
    if not job["started_at"] or job["state"] in ("queued", "held", "placed", "claiming"):
        return "-"
    return format_duration(seconds_since(job["started_at"], job["ended_at"]))


def _component_sizes(job: Json) -> str:
    placed = job["components"] if job["state"] != "queued" else []
    return ",".join(f"{component['cluster']}:{component['size']}" for component in placed) or "-"


QUEUE: Columns = {
    "ID": name_of,
    "NAME": lambda job: job["name"] or "-",
    "USER": itemgetter("owner"),
    "PRI": itemgetter("priority"),
    "STATE": itemgetter("state"),
    "NODES": lambda job: nodes_of(job["request"]),
    "TIME": _running_time,
    "CLUSTERS": _component_sizes,
    "REASON": _job_reason,
}
WIDE_QUEUE: Columns = {
    **{name: cell for name, cell in QUEUE.items() if name != "REASON"},
    "SUBMITTED": itemgetter("submitted_at"),
    "HOME": lambda job: job.get("home_site") or "-",
    "TYPE": lambda job: job["request"]["type"],
    "POLICY": itemgetter("policy"),
    "RESTARTS": itemgetter("restarts"),
    "EXIT": lambda job: "-" if job["exit_code"] is None else job["exit_code"],
    "REASON": _job_reason,
}


def _cluster_reason(cluster: Json) -> str:
    """Return why a cluster is not used: time, user and reason of a drain, and other reasons."""
    order = cluster["drained"]
    if order is None:
        return cluster["reason"] or "-"
    since = format_time(_parse_time(order["at"]).timestamp(), datetime.now(UTC).timestamp())
    text = f"since {since} UTC" + (f" by {order['by']}" if order["by"] else "")
    text += f": {order['reason']}" if order["reason"] else ""
    return text + (f"; also unusable after {cluster['errors']} errors" if cluster["unusable"] else "")


def _node_count(name: str) -> Callable[[Json], Any]:
    """Return the getter of a number of nodes: ``?`` while the uses of a cluster's nodes are unknown."""
    return lambda cluster: "?" if cluster.get("unknown") else cluster[name]


CLUSTERS: Columns = {
    **{name.upper(): itemgetter(name) for name in ("name", "kind", "state", "total")},
    **{name.upper(): _node_count(name) for name in ("idle", "used", "background", "down")},
    "ERRORS": itemgetter("errors"),
    "REASON": _cluster_reason,
}


def explain_headline(explanation: Json) -> str:
    """Return the decisive reason of an explanation, with the job."""
    job, headline = explanation["job"], str(explanation["headline"])
    if job is None:
        return headline if explanation["state"] == "placed" else f"would wait: {headline}"
    if explanation["state"] == "queued":
        return f"job {job} {headline if headline.startswith('waits ') else f'waits: {headline}'}"
    return f"job {job}: {headline}"
