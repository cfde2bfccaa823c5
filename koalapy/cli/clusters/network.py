"""The commands for the network between the clusters: the matrix, having it measured, and a link's history."""

import sys
import time
from contextlib import closing, suppress
from typing import Annotated

from koalapy.cli.clusters.network_matrix import history_table, measurement_text, network_page
from koalapy.cli.jobs.job_progress import WaitReporter
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Timeout, show_json
from koalapy.cli.terminal.width import terminal_size
from koalapy.client.client import Client, Json, in_path
from koalapy.client.errors import CliError, Exit, printable

POLL_INTERVAL = 0.5
"""Seconds between two looks at what is under way."""
ABSENCE_TIMEOUT = 60.0
"""Seconds for which the daemon may be away while it is waited for."""


def network(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show bandwidth and latency between and within the clusters, as they are known."""
    answer = daemon.client().get("/api/v1/network")
    if as_json:
        show_json(answer)
    else:
        terminal = terminal_size(sys.stdout)
        print(network_page(answer, terminal[0] if terminal else None))


def measure(
    clusters: Annotated[
        list[str] | None, Argument(help="the links among these; default: all", completes="clusters")
    ] = None,
    wait: Annotated[bool, Option("--wait/--no-wait", help="until all is measured")] = True,
    timeout: Timeout = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Measure the links within and between clusters by MPI ping-pongs, which are jobs of low priority."""
    client = daemon.client()
    deadline = None if timeout is None else time.monotonic() + timeout
    order = {"clusters": clusters} if clusters else None
    asked = client.post("/api/v1/network/measure", order)
    if not wait:
        _tell_asked(asked, as_json=as_json)
        return _code_of(asked["links"])
    try:
        found = _follow(client, asked, deadline, quiet=as_json)
    except KeyboardInterrupt:
        raise CliError("the measurements go on", Exit.INTERRUPTED, "see koala network") from None
    if as_json:
        show_json({"since": asked["since"], "links": found})
    if any(link["result"] is None or link["result"]["error"] for link in found if not link["reason"]):
        return Exit.FAILED
    return _code_of(found)


def _code_of(links: list[Json]) -> Exit:
    """Where not one of them could be measured, nothing was done of what was asked for."""
    if any(not link["reason"] for link in links):
        return Exit.OK
    print("koala: nothing is measured; see the reasons, and koala clusters", file=sys.stderr)
    return Exit.FAILED


def _tell_asked(asked: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(asked)
        return
    for link in asked["links"]:
        print(printable(f"{_name(link)}: {'not measured, ' + link['reason'] if link['reason'] else 'under way'}"))


def _follow(client: Client, asked: Json, deadline: float | None, *, quiet: bool) -> list[Json]:
    """Tell of each link as soon as it is measured; all that was asked for, with what was found."""
    waiting = {(link["one"], link["other"]): link for link in asked["links"]}
    found: list[Json] = []
    with closing(_Reporter(client)) as reporter:
        while True:
            links = _links(client)
            for link in _over(links, waiting):
                del waiting[link["one"], link["other"]]
                result = None if link["reason"] else _result(client, link, asked["since"])
                found.append({**link, "job": result["job"] if result else link["job"], "result": result})
                if not quiet:
                    print(printable(f"{_name(link)}: {measurement_text(result, link['reason'])}"), flush=True)
            if not waiting:
                return found
            if deadline is not None and time.monotonic() >= deadline:
                left = ", ".join(_name(link) for link in waiting.values())
                raise CliError(f"not measured in time: {left}", Exit.TIMEOUT, "the measurements go on: koala network")
            reporter.look([link for link in links if (link["one"], link["other"]) in waiting])
            client.timeouts.sleep(POLL_INTERVAL)


class _Reporter:
    """Says what the job waits for that measures now, as whoever waits for a job is told."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._job = 0
        self._wait: WaitReporter | None = None

    def look(self, links: list[Json]) -> None:
        job = next((link["under_way"]["job"] for link in links if link["under_way"] and link["under_way"]["job"]), 0)
        if job != self._job:
            self.close()
            self._job, self._wait = job, WaitReporter(self._client.timeouts) if job else None
        if self._wait is not None:
            with suppress(CliError):  # the daemon is away, or the job was removed
                self._wait.update(self._client.get(f"/api/v1/jobs/{job}"), is_reported=False)

    def close(self) -> None:
        if self._wait is not None:
            self._wait.close()


def _links(client: Client) -> list[Json]:
    """What is known of all links; a daemon that goes away is waited for."""
    since = time.monotonic()
    while True:
        try:
            links: list[Json] = client.get("/api/v1/network")["links"]
            return links
        except CliError as error:
            if error.code is not Exit.UNREACHABLE or time.monotonic() - since > ABSENCE_TIMEOUT:
                raise
            client.timeouts.sleep(POLL_INTERVAL)


def _over(links: list[Json], waiting: dict[tuple[str, str], Json]) -> list[Json]:
    """Those of the links that are not under way, or not any more."""
    under_way = {(link["one"], link["other"]) for link in links if link["under_way"]}
    return [link for pair, link in waiting.items() if link["reason"] or pair not in under_way]


def _result(client: Client, link: Json, since: str) -> Json | None:
    """The ping-pong of a link that was asked for; None when the daemon has lost it."""
    lines: list[Json] = client.get(_history(link["one"], link["other"]))["measurements"]
    return next((line for line in lines if line["kind"] != "transfer" and line["at"] >= since), None)


def history(
    one: Annotated[str, Argument(help="a cluster", completes="clusters")],
    other: Annotated[str, Argument(help="another, or the same for the network within it", completes="clusters")],
    limit: Annotated[int, Option(help="how many lines at most", min=1, max=1000)] = 20,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """What was measured between two clusters, newest first."""
    client = daemon.client()
    answer = client.get(_history(one, other), limit=limit)
    if as_json:
        show_json(answer)
        return
    if not answer["measurements"]:
        print(f"koala: nothing was ever measured here; koala network measure {one} {other}", file=sys.stderr)
    print(history_table(answer["measurements"]))


def _history(one: str, other: str) -> str:
    return f"/api/v1/network/{in_path(one)}/{in_path(other)}/history"


def _name(link: Json) -> str:
    return f"{link['one']} - {link['other']}"


network_group = Group(
    "Show what is known of the network between clusters, or have it measured.",
    {"measure": measure, "history": history},
    default=network,
)
