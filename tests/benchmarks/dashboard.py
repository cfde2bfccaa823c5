"""Measure the dashboard in a browser and in the daemon, and print a line of JSON: ``make bench-dashboard``.

``first_paint_ms``: median over ten loads of Now. ``longest_task_ms``: longest task of the browser while the longest
page of 2,000 jobs is shown and refreshed. ``page_kb``: compressed size of pages. ``open_pages_share``: share of a core
that the daemon uses for 50 open pages with two changes a second, beyond its use without pages.
"""

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.dashboard.browser import Visitor, chromium
from tests.grid.embedded import EmbeddedGrid

JOB_COUNT, PAGE_COUNT, DURATION_S = 2000, 50, 12.0
LONGEST_PAGE = "/queue?limit=200"
"""The page with the most rows."""


def submit_waiting_jobs(grid: EmbeddedGrid, jobs: int) -> None:
    """Submit a job on all nodes, and ``jobs`` jobs that wait for them."""
    cork = {"type": "fixed", "components": [{"cluster": name, "size": size} for name, size in grid.nodes.items()]}
    grid.wait_for_state(grid.submit(cork, "sleep", "3600", launcher="processes"), "running")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: grid.submit(cork, "true", launcher="processes", name=f"job-{n}"), range(jobs)))


def measure_first_paint(visitor: Visitor) -> float:
    times = []
    for _ in range(10):
        visitor.open("/", live=False)
        visitor.page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        times.append(visitor.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    return statistics.median(times)


def measure_longest_task(visitor: Visitor, path: str) -> float:
    visitor.page.add_init_script(
        "window.longest = 0; new PerformanceObserver((list) => { for (const task of list.getEntries())"
        " window.longest = Math.max(window.longest, task.duration); }).observe({type: 'longtask', buffered: true});"
    )
    page = visitor.open(path)
    page.wait_for_timeout(15_000)
    return float(page.evaluate("window.longest"))


def measure_page_sizes(client: httpx2.Client, paths: list[str]) -> dict[str, float]:
    """Return the compressed sizes of pages in KB."""
    sizes = {}
    for path in paths:
        with client.stream("GET", path, headers={"Accept": "text/html", "Accept-Encoding": "gzip"}) as answer:
            sizes[path] = sum(len(piece) for piece in answer.iter_raw()) / 1024
    return sizes


def measure_core_share(grid: EmbeddedGrid, pages: int, path: str, cookies: Any) -> float:
    """Return the share of a core that the daemon uses while ``pages`` pages follow two changes a second."""
    assert grid.daemon is not None
    process = psutil.Process(grid.daemon.pid)
    stop = time.monotonic() + DURATION_S + 3

    def follow() -> None:
        with httpx2.Client(base_url=grid.url, cookies=cookies, timeout=60) as client:
            client.get(path, headers={"Accept-Encoding": "gzip"})
            with client.stream("GET", "/events") as events:
                for line in events.iter_lines():
                    if time.monotonic() > stop:
                        return
                    if line.startswith("event: changed"):
                        client.get(path, headers={"HX-Request": "true", "Accept-Encoding": "gzip"})

    with ThreadPoolExecutor(max(1, pages)) as pool:
        following = [pool.submit(follow) for _ in range(pages)]
        time.sleep(3)
        times_before, began = process.cpu_times(), time.monotonic()
        while time.monotonic() - began < DURATION_S:
            grid.http.post("/api/v1/clusters/north/drain", json={"reason": str(time.monotonic())})
            time.sleep(0.5)
        times_after = process.cpu_times()
        spent = times_after.user + times_after.system - times_before.user - times_before.system
        share = spent / (time.monotonic() - began)
        grid.http.post("/api/v1/clusters/north/resume", json={})
        for follower in following:
            follower.result()
    return share


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        grid = EmbeddedGrid(Path(folder) / "koala").start()
        try:
            grid.wait_until_idle()
            submit_waiting_jobs(grid, JOB_COUNT)
            visitor = Visitor(browser, grid.url, grid.admin_token)
            paint = measure_first_paint(visitor)
            longest = measure_longest_task(visitor, LONGEST_PAGE)
            cookies = {cookie["name"]: cookie["value"] for cookie in visitor.context.cookies()}
            with httpx2.Client(base_url=grid.url, cookies=cookies, timeout=60) as client:
                sizes = measure_page_sizes(client, ["/", "/queue", LONGEST_PAGE, "/clusters", "/jobs/1"])
            baseline = measure_core_share(grid, 0, "/", cookies)
            shares = {path: measure_core_share(grid, PAGE_COUNT, path, cookies) - baseline for path in ("/", "/queue")}
            visitor.context.close()
        finally:
            grid.stop_daemon()
    figures = {
        "first_paint_ms": round(paint),
        "longest_task_ms": round(longest),
        "page_kb": {path: round(size, 1) for path, size in sizes.items()},
        "open_pages_share": {path: round(share, 3) for path, share in shares.items()},
        "load": psutil.getloadavg()[0],
    }
    json.dump(figures, sys.stdout)
    print()


if __name__ == "__main__":
    main()
