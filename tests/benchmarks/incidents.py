"""Play incidents on a grid and measure how soon the overview names cause and remedy: part of ``make bench-dashboard``.

The grid has the default settings, TLS, embedded clusters, and the cluster west with an agent of its own. An incident
counts as named when its alert, with the expected cause and remedy, is both on the overview and in ``GET
/api/v1/alerts``. Prints a table in Markdown.
"""

import argparse
import contextlib
import html
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

from tests.certificates import CertificateAuthority
from tests.grid.grid import wait_until
from tests.grid.test_incidents import IncidentGrid, fixed_request, request_all_nodes

LIMIT_S = 15.0
TIMEOUT_S = 60.0
PAGE = {"Accept": "text/html"}
FLOOD = 500


class StopwatchGrid(IncidentGrid):
    """A grid with the default rules, TLS, and a small disk for the data of the daemon."""

    def __init__(self, directory: Path, authority: CertificateAuthority) -> None:
        self.authority, self.pair = authority, authority.issue()
        tls = {"certificate": str(self.pair.certificate), "key": str(self.pair.key)}
        super().__init__(directory, rules={}, alerts={"flapping_changes": 100}, network={}, links=[], tls=tls)
        self.ca_file = authority.file
        self.clock_file = directory.parent / "clock"

    def find_resource_manager_of_west(self) -> tuple[psutil.Process, psutil.Process]:
        """Return the keeper and the resource manager of west, which its agent has started."""
        directory = str(self.directory.parent / "west" / "lrm")
        found = {p.pid: p for p in psutil.process_iter(["cmdline"]) if directory in (p.info["cmdline"] or ())}
        (manager,) = (process for process in found.values() if process.ppid() in found)
        return found[manager.ppid()], manager


Play = Callable[[StopwatchGrid], Iterator[None]]
"""Prepares an incident, yields, causes it, yields, and repairs it."""


@dataclass(frozen=True)
class Incident:
    """An incident, with the texts that its alert must contain."""

    name: str
    play: Play
    kind: str
    target: str
    cause: str
    remedy: str


INCIDENTS: list[Incident] = []


def incident(name: str, kind: str, target: str, cause: str, remedy: str) -> Callable[[Play], Play]:
    def register(play: Play) -> Play:
        INCIDENTS.append(Incident(name, play, kind, target, cause, remedy))
        return play

    return register


RESTART_WEST = "systemctl restart koala-agent@west"


@incident("resource manager killed", "resource-manager", "cluster west", "", "koala clusters drain west")
def kill_resource_manager(grid: StopwatchGrid) -> Iterator[None]:
    keeper, manager = grid.find_resource_manager_of_west()
    yield
    keeper.suspend()  # else it would let the agent start another one
    manager.kill()
    yield
    keeper.resume()


@incident(
    "resource manager hangs", "resource-manager", "cluster west", "not answering since", "koala clusters drain west"
)
def hang_resource_manager(grid: StopwatchGrid) -> Iterator[None]:
    _, manager = grid.find_resource_manager_of_west()
    yield
    manager.suspend()
    yield
    manager.resume()


@incident("agent stopped", "agent-away", "cluster west", "its agent is not connected", RESTART_WEST)
def stop_agent(grid: StopwatchGrid) -> Iterator[None]:
    yield
    grid.stop_west()
    yield
    grid.start_west()


@incident("agent hangs", "agent-away", "cluster west", "its agent has not answered for", RESTART_WEST)
def hang_agent(grid: StopwatchGrid) -> Iterator[None]:
    assert grid.west is not None
    yield
    os.kill(grid.west.pid, signal.SIGSTOP)
    yield
    os.kill(grid.west.pid, signal.SIGCONT)


@incident("disk full", "disk", "disk data directory", "left", "du -xh")
def fill_disk(grid: StopwatchGrid) -> Iterator[None]:
    return fill(grid.directory / "filler")


@incident("disk of an agent full", "disk", "disk spool of west", "left", "on the head node of west: du -xh")
def fill_disk_of_agent(grid: StopwatchGrid) -> Iterator[None]:
    return fill(grid.directory.parent / "west" / "filler")


def fill(filler: Path) -> Iterator[None]:
    yield
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))
    yield
    filler.unlink()


@incident("jobs failing at once", "black-hole", "cluster south", "jobs that ended there", "koala clusters drain south")
def fail_jobs(grid: StopwatchGrid) -> Iterator[None]:
    yield
    for name in ("north", "south") * 6:
        grid.submit(fixed_request(name), "sh", "-c", '[ -z "$BROKEN" ]')
    yield
    grid.run_koala("clusters", "drain", "south", "--reason", "repaired")
    time.sleep(3)
    grid.run_koala("clusters", "resume", "south")


@incident("flood of one user", "queue-flooded", "user mallory", "bob", "koala hold $(koala queue --state queued -q")
def flood_queue(grid: StopwatchGrid) -> Iterator[None]:
    gate = grid.make_gate()
    running = grid.submit(request_all_nodes(grid), *gate.hold)
    grid.wait_for_state(running, "running")
    jobs = [grid.submit(request_all_nodes(grid), "true", owner="mallory") for _ in range(FLOOD - 1)]
    jobs.append(grid.submit(request_all_nodes(grid), "true", owner="bob"))
    yield
    jobs.append(grid.submit(request_all_nodes(grid), "true", owner="mallory"))
    yield
    for job in jobs:
        grid.cancel(job)
    gate.open()


@incident("clock 2 h off", "clock", "cluster west", "it shows", "timedatectl")
def set_clock(grid: StopwatchGrid) -> Iterator[None]:
    grid.stop_west()
    grid.start_west(clock_file=grid.clock_file)
    wait_until(lambda: is_calm(grid), "the agent of west", TIMEOUT_S)
    yield
    grid.clock_file.touch()
    yield
    grid.clock_file.unlink()


@incident("database locked", "database", "database", "locked", "fuser -v")
def lock_database(grid: StopwatchGrid) -> Iterator[None]:
    holder = sqlite3.connect(grid.directory / "koala.db", isolation_level=None, timeout=60)
    yield
    holder.execute("begin immediate")
    yield
    holder.close()


@incident("certificate expiring", "certificate", "certificate", "it expires", "replace")
def renew_certificate(grid: StopwatchGrid) -> Iterator[None]:
    yield
    grid.pair.replace_with(grid.authority.issue(days=10))
    yield
    grid.pair.replace_with(grid.authority.issue())


@incident("old agent", "old-version", "cluster west", "not updated", RESTART_WEST)
def start_old_agent(grid: StopwatchGrid) -> Iterator[None]:
    grid.stop_west()
    yield
    grid.start_west("0.0.9")
    yield
    grid.stop_west()
    grid.start_west()


@incident(
    "wrong agent token", "agent-away", "cluster west", "the token is not that of cluster west", "KOALA_AGENT_TOKEN"
)
def start_agent_with_wrong_token(grid: StopwatchGrid) -> Iterator[None]:
    grid.stop_west()
    yield
    grid.start_west(token="the-token-of-another-cluster")
    yield
    grid.stop_west()
    grid.start_west()


@dataclass(frozen=True)
class Result:
    """The seconds until each place named an incident, and the alerts then, the first one first."""

    page_s: float | None
    api_s: float | None
    summary: str = ""
    cause: str = ""
    remedy: str = ""
    others: Sequence[str] = ()


def measure(grid: StopwatchGrid, incident: Incident, pictures: Path | None) -> Result:
    """Play an incident and return how soon it was named; wait until the grid has no alerts before and after it."""
    wait_until(lambda: is_calm(grid), f"no alerts before {incident.name}", TIMEOUT_S)
    play = incident.play(grid)
    next(play)
    started = time.monotonic()
    next(play)
    result = watch(grid, incident, started)
    if pictures is not None and grid.page is not None:
        grid.page.goto("/")
        grid.page.screenshot(path=pictures / f"{incident.name.replace(' ', '-')}.png")
    next(play, None)
    return result


def is_calm(grid: StopwatchGrid) -> bool:
    """Return whether all clusters are usable and no alert is left, besides that of the recording."""
    try:
        return {alert["kind"] for alert in list_alerts(grid)} <= {"record"} and all(
            cluster["state"] == "usable" for cluster in grid.list_clusters()
        )
    except (httpx2.HTTPError, KeyError):
        return False


def list_alerts(grid: StopwatchGrid) -> list[dict[str, str]]:
    alerts: list[dict[str, str]] = grid.http.get("/api/v1/alerts").json()["alerts"]
    return alerts


def watch(grid: StopwatchGrid, incident: Incident, started: float) -> Result:
    """Poll the alerts and the overview until both name the incident."""
    page_s = api_s = None
    named: dict[str, str] = {}
    others: list[str] = []
    while time.monotonic() < started + TIMEOUT_S and (page_s is None or api_s is None):
        with contextlib.suppress(httpx2.HTTPError, KeyError):
            alerts = list_alerts(grid)
            others = [f"{a['kind']} {a['target']}" for a in alerts]
            for alert in alerts:
                if (
                    (alert["kind"], alert["target"]) == (incident.kind, incident.target)
                    and incident.cause in alert["cause"]
                    and incident.remedy in alert["remedy"]
                ):
                    named = alert
                    api_s = api_s or time.monotonic() - started
            answer = grid.http.get("/", headers=PAGE)
            page = html.unescape(answer.text)
            if named and answer.status_code == 200 and all(named[t] in page for t in ("summary", "cause", "remedy")):
                page_s = page_s or time.monotonic() - started
        time.sleep(0.1)
    texts = {name: named.get(name, "") for name in ("summary", "cause", "remedy")}
    return Result(page_s, api_s, **texts, others=others)


@contextlib.contextmanager
def start_grid() -> Iterator[StopwatchGrid]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        disks = directory / "data", directory / "west"
        for disk in disks:
            disk.mkdir(mode=0o700)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m,mode=0700", "tmpfs", disk], check=True)
        grid = StopwatchGrid(disks[0], CertificateAuthority(directory / "authority"))
        try:
            grid.start()
            yield grid
        finally:
            grid.stop_west()
            grid.cancel_all_jobs()
            grid.stop_daemon()
            for disk in disks:
                subprocess.run(["umount", "-l", disk], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="play incidents whose name contains one of these only")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots of the overview, by Chromium")
    given = parser.parse_args()
    chosen = [i for i in INCIDENTS if not given.names or any(name in i.name for name in given.names)]
    slow = []
    with contextlib.ExitStack() as stack:
        grid = stack.enter_context(start_grid())
        if given.pictures:
            from tests.dashboard.browser import Visitor, chromium

            given.pictures.mkdir(parents=True, exist_ok=True)
            browser = stack.enter_context(chromium())
            grid.page = Visitor(browser, grid.url, grid.admin_token, ignore_https_errors=True).page
        print("| incident | seconds | alert | cause | remedy |\n| --- | --- | --- | --- | --- |", flush=True)
        for incident in chosen:
            result = measure(grid, incident, given.pictures)
            seconds = None if result.page_s is None or result.api_s is None else max(result.page_s, result.api_s)
            if seconds is None or seconds > LIMIT_S:
                slow.append(incident.name)
            shown = "never" if seconds is None else f"{seconds:.1f}"
            print(f"| {incident.name} | {shown} | {result.summary} | {result.cause} | {result.remedy} |", flush=True)
            print(f"#   page {result.page_s} API {result.api_s}: {result.others}", file=sys.stderr, flush=True)
    print(f"load {psutil.getloadavg()[0]:.1f}, slower than {LIMIT_S:g} s: {slow or 'none'}")


if __name__ == "__main__":
    main()
