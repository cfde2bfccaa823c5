"""Measure the dashboard of 60 clusters and 20,000 jobs: ``make bench-dashboard``.

It prints a table of all pages: median and 90th percentile of the daemon's processor time for a page that no viewer has
opened since a change, with those above the budget marked, and its compressed size. Simulations are listed apart, with
the longest wait for another page during each. A line of JSON follows:

- ``first_paint_ms``: median first contentful paint of the overview on a slow phone: 1.6 Mbit/s, round trips of 150 ms,
  a processor of a quarter of the speed.
- ``longest_task_ms``: longest task of a browser while the page with the most rows is shown and refreshed.

``--pages`` measures only the pages, ``--only PAGE`` one of them, ``--scene wide`` a grid of 500 clusters. ``--against
FOLDER`` compares with another checkout: both daemons run at the same time, and each page is requested from both in
turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import psutil

from tests.dashboard.browser import PHONE, Visitor, chromium

LONGEST_PAGE = "/queue?limit=200"
"""The page with the most rows."""
PAGES = (
    "/", "/timeline", "/timeline?table=true", "/timeline?since=7d", "/?since=30d", "/my-jobs",
    "/queue", LONGEST_PAGE, "/queue?sort=-nodes", "/queue?q=user:alice state:waiting", "/queue?q=state:any",
    "/queue?q=state:failed", "/queue?q=state:succeeded user:alice size>8", "/queue?q=state:over cluster:delft-1",
    "/queue/confirm?action=hold&all=true", "/clusters", "/clusters/delft-1", "/clusters/delft-1/nodes",
    "/jobs/10", "/jobs/RUNNING", "/jobs/WAITING", "/jobs/new", "/jobs/new?from=10",
    "/users", "/users?user=alice", "/files", "/maintenance", "/scheduler/audit", "/scheduler",
    "/network", "/network/delft-1/leiden-1",
    "/forecast", "/forecast?priority=high", "/history", "/history?by=user", "/forecast/what-if",
)  # fmt: skip
"""All pages but those of simulations. ``RUNNING`` and ``WAITING`` stand for jobs in these states."""
SIMULATIONS = ("/forecast/what-if/result?horizon=2592000s", "/clusters/delft-1/drain/result")
"""Pages of which a child process computes the results."""
PAGE_BUDGETS_MS = {"large": 25.0, "wide": 60.0}
BUDGETS = {"first_paint_ms": 1000}
REPEATS = 9
CHANGE_INTERVAL_S = 0.6
"""Longer than the time for which a page is used after a change."""
SLOW_PHONE = {"offline": False, "latency": 150, "downloadThroughput": 200_000, "uploadThroughput": 94_000}
"""Bytes a second, and milliseconds."""


class Daemon:
    """A daemon with the large scene, in a separate process."""

    def __init__(self, process: psutil.Process, url: str, token: str) -> None:
        self._process, self.url, self.token = process, url, token
        self.http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60)

    def cpu_time(self) -> float:
        """Return the processor time of all threads in seconds, to the nanosecond."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def change(self) -> None:
        """Change a cluster, so that pages are outdated."""
        body = {"reason": str(time.monotonic())}
        self.http.post("/api/v1/clusters/leiden-1/drain", json=body).raise_for_status()

    def find_job(self, state: str) -> str:
        """Return the id of a job in a state."""
        return str(
            self.http.get("/queue.json", params={"q": f"state:{state}"}).raise_for_status().json()["jobs"][0]["id"]
        )

    def measure(self, path: str) -> tuple[float, int]:
        """Return the processor time in milliseconds and the compressed size in bytes of a page after a change."""
        self.change()
        time.sleep(CHANGE_INTERVAL_S)
        start = self.cpu_time()
        headers = {"Accept": "text/html", "Accept-Encoding": "gzip"}
        with self.http.stream("GET", path, headers=headers) as answer:
            assert answer.status_code == 200, (path, answer.status_code)
            size = sum(len(piece) for piece in answer.iter_raw())
        return (self.cpu_time() - start) * 1000, size

    def log_in(self, user: str, role: str) -> dict[str, str]:
        """Return the cookies of a new session of a user."""
        body = {"user": user, "role": role}
        token = self.http.post("/api/v1/tokens", json=body).raise_for_status().json()["token"]
        with httpx2.Client(base_url=self.url) as client:
            client.post("/login", data={"token": token}, headers={"Origin": self.url})
            return dict(client.cookies)


@contextmanager
def start_daemon(scene: str, checkout: Path) -> Iterator[Daemon]:
    command = [sys.executable, "-m", "tests.dashboard.scenes", scene]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if line.startswith("http://"))
            yield Daemon(psutil.Process(process.pid), *line.split())
        finally:
            process.terminate()


def print_pages(daemons: Sequence[Daemon], paths: Sequence[str], budget: float) -> None:
    """Print the processor time and size of each page; of two daemons also their ratio, the second one's as 1."""
    print(f"{'page':42} {'median ms':>9} {'90 % ms':>8} {'KB':>6}" + (" other ms  ratio" if len(daemons) > 1 else ""))
    jobs = {name: daemons[0].find_job(state) for name, state in (("RUNNING", "running"), ("WAITING", "queued"))}
    for path in paths:
        actual = path.replace("RUNNING", jobs["RUNNING"]).replace("WAITING", jobs["WAITING"])
        costs: list[list[float]] = [[] for _ in daemons]
        size = 0
        for turn in range(REPEATS):
            order = list(zip(daemons, costs, strict=True))
            for daemon, own_costs in order if turn % 2 == 0 else order[::-1]:
                cost, own_size = daemon.measure(actual)
                own_costs.append(cost)
                size = own_size if daemon is daemons[0] else size
        medians = [statistics.median(own_costs) for own_costs in costs]
        percentile = statistics.quantiles(costs[0], n=10, method="inclusive")[-1]
        other = f" {medians[1]:8.1f} {medians[0] / medians[1]:6.2f}" if len(medians) > 1 else ""
        mark = "  above the budget" if medians[0] > budget else ""
        print(f"{path:42} {medians[0]:9.1f} {percentile:8.1f} {size / 1024:6.1f}{other}{mark}", flush=True)


def print_simulations(daemon: Daemon) -> None:
    """Print the duration of each simulation, the daemon's processor time, and the longest wait for a page during it."""
    print(f"{'simulation':42} {'wall s':>9} {'daemon ms':>9} {'page ms':>8}")
    for path in SIMULATIONS:
        start, cpu_start, waits = time.monotonic(), daemon.cpu_time(), list[float]()
        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(daemon.http.get, path, headers={"Accept": "text/html"}, timeout=600)
            while not answer.done():
                request_start = time.monotonic()
                daemon.http.get("/clusters.json").raise_for_status()
                waits.append(time.monotonic() - request_start)
                time.sleep(CHANGE_INTERVAL_S)
        assert answer.result().status_code == 200, path
        wall, cpu = time.monotonic() - start, daemon.cpu_time() - cpu_start
        print(f"{path:42} {wall:9.1f} {cpu * 1000:9.0f} {max(waits) * 1000:8.0f}", flush=True)


def measure_first_paint(visitor: Visitor) -> float:
    """Return the median time of the first paint of the overview, with an empty cache, on a slow phone."""
    client = visitor.context.new_cdp_session(visitor.page)
    client.send("Network.enable")
    client.send("Network.emulateNetworkConditions", SLOW_PHONE)
    client.send("Network.setCacheDisabled", {"cacheDisabled": True})
    client.send("Emulation.setCPUThrottlingRate", {"rate": 4})
    times = []
    for _ in range(5):
        visitor.open("/", live=False)
        visitor.page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        times.append(visitor.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    client.detach()
    return float(statistics.median(times))


def measure_longest_task(visitor: Visitor, path: str, duration_ms: float) -> float:
    visitor.page.add_init_script(
        "window.longest = 0; new PerformanceObserver((list) => { for (const task of list.getEntries())"
        " window.longest = Math.max(window.longest, task.duration); }).observe({type: 'longtask', buffered: true});"
    )
    page = visitor.open(path)
    page.wait_for_timeout(duration_ms)
    return float(page.evaluate("window.longest"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="measure only the pages")
    parser.add_argument("--only", metavar="PAGE", action="append", help="measure only this page")
    parser.add_argument("--scene", choices=PAGE_BUDGETS_MS, default="large", help="wide: 500 clusters, 2,000 jobs")
    parser.add_argument("--against", metavar="FOLDER", type=Path, help="compare the pages with those of a checkout")
    given = parser.parse_args()
    with ExitStack() as stack:
        checkouts = [Path.cwd(), *([given.against] if given.against else [])]
        daemons = [stack.enter_context(start_daemon(given.scene, checkout)) for checkout in checkouts]
        print_pages(daemons, given.only or PAGES, PAGE_BUDGETS_MS[given.scene])
        if not given.only:
            print_simulations(daemons[0])
        if not (given.pages or given.only or given.against):
            daemon = daemons[0]
            with chromium() as browser:
                visitor = Visitor(browser, daemon.url, daemon.token, viewport=PHONE)
                paint = measure_first_paint(visitor)
                visitor.context.close()
                visitor = Visitor(browser, daemon.url, daemon.token)
                longest = measure_longest_task(visitor, LONGEST_PAGE, 15_000)
                visitor.context.close()
            figures = {"first_paint_ms": round(paint), "longest_task_ms": round(longest)}
            exceeded = {name: figures[name] for name, budget in BUDGETS.items() if figures[name] > budget}
            print(json.dumps({**figures, "budgets": BUDGETS, "exceeded": exceeded, "load": psutil.getloadavg()[0]}))


if __name__ == "__main__":
    main()
