"""Measure the dashboard of 60 clusters and 20,000 jobs, and print a line of JSON: ``make bench-dashboard``.

- ``page_cpu_ms``: median processor time of the daemon for each page that no viewer has opened since a change, and its
  budget.
- ``open_pages_share``: share of a core for 200 open pages of ten operators with two changes a second, beyond the use
  without pages, and its budget. ``page_age_s``: median time from a change until a page is asked for again.
- ``first_paint_ms``: median first contentful paint of the overview on a slow phone: 1.6 Mbit/s, round trips of 150 ms,
  a processor of a quarter of the speed.
- ``longest_task_ms``: longest task of a browser while the page with the most rows is shown and refreshed.
- ``page_kb``: compressed size of the pages.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.dashboard.browser import PHONE, Visitor, chromium

LONGEST_PAGE = "/queue?limit=200"
"""The page with the most rows."""
PAGES = (
    "/", "/map", "/timeline", "/my-jobs", "/queue", LONGEST_PAGE, "/queue?sort=-nodes", "/queue?q=state:any",
    "/timeline?table=true", "/clusters", "/clusters/delft-1",
    "/jobs/10", "/jobs/16900", "/jobs/19000", "/jobs/new", "/users", "/files",
    "/audit", "/scheduler", "/network", "/capacity", "/history",
)  # fmt: skip
OPEN_PAGES, SESSIONS = 200, 10
OPENED = ("/", "/queue", "/clusters", "/queue?q=state:waiting")
BUDGETS = {"page_cpu_ms": 20, "open_pages_share": 0.05, "first_paint_ms": 1000}
REPEATS = 7
CHANGE_INTERVAL_S = 0.6
"""Longer than the time for which a page is used after a change."""
SLOW_PHONE = {"offline": False, "latency": 150, "downloadThroughput": 200_000, "uploadThroughput": 94_000}
"""Bytes a second, and milliseconds."""


class Daemon:
    """A daemon with the large scene, in a process of its own."""

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

    def log_in(self, user: str) -> dict[str, str]:
        """Return the cookies of a new session of an operator."""
        body = {"user": user, "role": "operator"}
        token = self.http.post("/api/v1/tokens", json=body).raise_for_status().json()["token"]
        with httpx2.Client(base_url=self.url) as client:
            client.post("/login", data={"token": token}, headers={"Origin": self.url})
            return dict(client.cookies)


@contextmanager
def start_daemon() -> Iterator[Daemon]:
    command = [sys.executable, "-m", "tests.dashboard.scenes", "large"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if line.startswith("http://"))
            yield Daemon(psutil.Process(process.pid), *line.split())
        finally:
            process.terminate()


def measure_pages(daemon: Daemon, paths: tuple[str, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the processor time in milliseconds and the compressed size in KB of each page."""

    def measure(path: str) -> tuple[float, float]:
        costs, size = [], 0
        for _ in range(REPEATS):
            daemon.change()
            time.sleep(CHANGE_INTERVAL_S)
            start = daemon.cpu_time()
            headers = {"Accept": "text/html", "Accept-Encoding": "gzip"}
            with daemon.http.stream("GET", path, headers=headers) as answer:
                assert answer.status_code == 200, (path, answer.status_code)
                size = sum(len(piece) for piece in answer.iter_raw())
            costs.append(daemon.cpu_time() - start)
        return round(statistics.median(costs) * 1000, 1), round(size / 1024, 1)

    measured = {path: measure(path) for path in paths}
    return {path: cost for path, (cost, _) in measured.items()}, {path: size for path, (_, size) in measured.items()}


async def measure_open_pages(daemon: Daemon, pages: int, duration: float) -> tuple[float, float]:
    """Return the share of a core while pages follow two changes a second, and the median age of a page in seconds."""
    cookies = [daemon.log_in(f"operator-{number}") for number in range(SESSIONS)] if pages else []
    ages: list[float] = []
    changed_at = time.monotonic()

    async def follow(number: int) -> None:
        path = OPENED[number % len(OPENED)]
        part = {"HX-Request": "true", "Accept": "text/html", "Accept-Encoding": "gzip"}
        async with httpx2.AsyncClient(base_url=daemon.url, cookies=cookies[number % SESSIONS], timeout=60) as client:
            (await client.get(path, headers=part)).raise_for_status()
            async with client.stream("GET", "/events") as events:
                async for line in events.aiter_lines():
                    if line.startswith("event: changed"):
                        ages.append(time.monotonic() - changed_at)
                        (await client.get(path, headers=part)).raise_for_status()

    followers = [asyncio.create_task(follow(number)) for number in range(pages)]
    start = 0.0
    began = time.monotonic()
    settled = began + 10
    while time.monotonic() < settled + duration:
        if not start and time.monotonic() >= settled:
            start, began = daemon.cpu_time(), time.monotonic()
            ages.clear()
        await asyncio.to_thread(daemon.change)
        changed_at = time.monotonic()
        await asyncio.sleep(0.5)
    share = (daemon.cpu_time() - start) / (time.monotonic() - began)
    for follower in followers:
        follower.cancel()
    failures = [
        each for each in await asyncio.gather(*followers, return_exceptions=True) if isinstance(each, Exception)
    ]
    assert not failures, failures[0]
    return share, statistics.median(ages) if ages else 0.0


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="measure the processor time of these pages only")
    given = parser.parse_args()
    with start_daemon() as daemon:
        costs, sizes = measure_pages(daemon, tuple(given.pages) or PAGES)
        figures: dict[str, Any] = {"page_cpu_ms": costs, "page_kb": sizes}
        if not given.pages:
            idle, _ = asyncio.run(measure_open_pages(daemon, 0, 20))
            share, age = asyncio.run(measure_open_pages(daemon, OPEN_PAGES, 40))
            with chromium() as browser:
                visitor = Visitor(browser, daemon.url, daemon.token, viewport=PHONE)
                paint = measure_first_paint(visitor)
                visitor.context.close()
                visitor = Visitor(browser, daemon.url, daemon.token)
                longest = measure_longest_task(visitor, LONGEST_PAGE, 15_000)
                visitor.context.close()
            figures |= {
                "open_pages_share": round(share - idle, 3),
                "page_age_s": round(age, 1),
                "first_paint_ms": round(paint),
                "longest_task_ms": round(longest),
            }
    exceeded = {
        name: {path: value for path, value in figures[name].items() if value > budget}
        if isinstance(figures[name], dict)
        else figures[name]
        for name, budget in BUDGETS.items()
        if name in figures
        and (max(figures[name].values()) if isinstance(figures[name], dict) else figures[name]) > budget
    }
    print(json.dumps({**figures, "budgets": BUDGETS, "exceeded": exceeded, "load": psutil.getloadavg()[0]}))


if __name__ == "__main__":
    main()
