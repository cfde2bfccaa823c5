"""What the dashboard costs, in a real browser and in the daemon, as one line of JSON: ``make bench-dashboard``.

``first_paint_ms``: median over ten loads of Now. ``longest_task_ms``: of the browser while the longest page of 2,000
jobs is shown and asked for again. ``page_kb``: pages as they come, compressed. ``open_pages_share``: of one core that
the daemon used more while 50 pages were open and something changed twice a second, than with none.
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

JOBS, PAGES, SECONDS = 2000, 50, 12.0
LONGEST = "/queue?limit=200"
"""As many rows as a page shows."""


def filled(grid: EmbeddedGrid, jobs: int) -> None:
    """So many jobs that wait, for they want more nodes than there are now."""
    cork = {"type": "fixed", "components": [{"cluster": name, "size": size} for name, size in grid.nodes.items()]}
    grid.wait_for_state(grid.submit(cork, "sleep", "3600", launcher="processes"), "running")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: grid.submit(cork, "true", launcher="processes", name=f"job-{n}"), range(jobs)))


def first_paint(visitor: Visitor) -> float:
    times = []
    for _ in range(10):
        visitor.open("/", live=False)
        visitor.page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        times.append(visitor.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    return statistics.median(times)


def longest_task(visitor: Visitor, path: str) -> float:
    visitor.page.add_init_script(
        "window.longest = 0; new PerformanceObserver((list) => { for (const task of list.getEntries())"
        " window.longest = Math.max(window.longest, task.duration); }).observe({type: 'longtask', buffered: true});"
    )
    page = visitor.open(path)
    page.wait_for_timeout(15_000)
    return float(page.evaluate("window.longest"))


def page_sizes(client: httpx2.Client, paths: list[str]) -> dict[str, float]:
    """In KB, compressed, as they come over the wire."""
    found = {}
    for path in paths:
        with client.stream("GET", path, headers={"Accept": "text/html", "Accept-Encoding": "gzip"}) as answer:
            found[path] = sum(len(piece) for piece in answer.iter_raw()) / 1024
    return found


def share_of(grid: EmbeddedGrid, pages: int, path: str, cookies: Any) -> float:
    """Of a core, while so many pages follow and something changes twice a second."""
    assert grid.daemon is not None
    process = psutil.Process(grid.daemon.pid)
    stop = time.monotonic() + SECONDS + 3

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
        before, began = process.cpu_times(), time.monotonic()
        while time.monotonic() - began < SECONDS:
            grid.http.post("/api/v1/clusters/north/drain", json={"reason": str(time.monotonic())})
            time.sleep(0.5)
        after = process.cpu_times()
        spent = after.user + after.system - before.user - before.system
        share = spent / (time.monotonic() - began)
        grid.http.post("/api/v1/clusters/north/resume", json={})
        for one in following:
            one.result()
    return share


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        grid = EmbeddedGrid(Path(folder) / "koala").start()
        try:
            grid.wait_until_idle()
            filled(grid, JOBS)
            visitor = Visitor(browser, grid.url, grid.admin_token)
            paint = first_paint(visitor)
            longest = longest_task(visitor, LONGEST)
            cookies = {cookie["name"]: cookie["value"] for cookie in visitor.context.cookies()}
            with httpx2.Client(base_url=grid.url, cookies=cookies, timeout=60) as client:
                sizes = page_sizes(client, ["/", "/queue", LONGEST, "/clusters", "/jobs/1"])
            alone = share_of(grid, 0, "/", cookies)
            shares = {path: share_of(grid, PAGES, path, cookies) - alone for path in ("/", "/queue")}
            visitor.context.close()
        finally:
            grid.stop_daemon()
    told = {
        "first_paint_ms": round(paint),
        "longest_task_ms": round(longest),
        "page_kb": {path: round(size, 1) for path, size in sizes.items()},
        "open_pages_share": {path: round(share, 3) for path, share in shares.items()},
        "load": psutil.getloadavg()[0],
    }
    json.dump(told, sys.stdout)
    print()


if __name__ == "__main__":
    main()
