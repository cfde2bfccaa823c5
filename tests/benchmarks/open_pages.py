"""Measure 200 open pages of 20 users at a grid of 60 clusters and 20,000 jobs, and print a line of JSON.

The grid changes four times a second: clusters are drained, and jobs of users are held and released.

- ``share``: share of a core that the daemon needs beyond that without open pages, and its budget.
- ``delay_s``: median and 95th percentile of the time from a change until its bytes reach a page that shows it, and the
  budget of the median.
"""

import argparse
import asyncio
import json
import re
import statistics
import time
from itertools import cycle
from pathlib import Path

import httpx2
import psutil

from tests.benchmarks.dashboard import Daemon, start_daemon
from tests.dashboard.scenes import USERS

DRAINED = "leiden-1"
OPENED = (
    ("/", 30, True), ("/queue", 20, True), ("/clusters", 20, True), ("/queue?q=state:held", 10, True),
    ("/network", 10, True), ("/timeline", 10, True), (f"/clusters/{DRAINED}", 10, True), ("/scheduler", 10, True),
    ("/my-jobs", 30, False), ("/jobs/OWN", 20, False), ("/", 20, False), ("/clusters", 10, False),
)  # fmt: skip
"""Pages, their number, and whether operators or users have opened them; ``OWN`` is a job of the user."""
OPERATORS = tuple(f"operator-{number}" for number in range(10))
BUDGETS = {"share": 0.05, "delay_s": 2.0}
CHANGE_INTERVAL_S = 0.25
HELD_S = 4.0
SETTLING_S = 10.0
LOST_S = 5.0
"""Age of a change that a page should have shown, after which it counts as late although it is still not shown."""


class OpenPage:
    """A page in a browser: the changes that it should show, and the delays with which it has shown them."""

    def __init__(self, path: str, user: str) -> None:
        self.path, self.user = path, user
        self.awaited: dict[int, float] = {}
        self.delays: list[float] = []

    def shows(self, owner: str) -> bool:
        """Return whether the page shows the reasons of held jobs of a user, or of a drain if ``owner`` is empty."""
        if not owner:
            return self.path in ("/", "/clusters", f"/clusters/{DRAINED}")
        is_own = self.user == owner and self.path.startswith(("/jobs/", "/my-jobs"))
        return is_own or self.path == "/queue?q=state:held"

    async def follow(self, client: httpx2.AsyncClient, cookies: dict[str, str]) -> None:
        """Receive the page as a browser does, and note the changes that it shows."""
        path, _, query = self.path.partition("?")
        address = f"{'/now' if path == '/' else path}.events?{query}".rstrip("?")
        cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
        async with client.stream("GET", address, headers={"Accept-Encoding": "gzip", "Cookie": cookie}) as answer:
            answer.raise_for_status()
            text = ""
            async for piece in answer.aiter_text():
                *events, text = (text + piece).split("\n\n")
                if numbers := [int(number) for event in events for number in re.findall(r"change-(\d+)-", event)]:
                    self._note_shown(max(numbers))

    def _note_shown(self, newest: int) -> None:
        now = time.monotonic()
        for number in [number for number in self.awaited if number <= newest]:
            self.delays.append(now - self.awaited.pop(number))


def open_pages(daemon: Daemon, jobs: dict[str, int]) -> list[tuple[OpenPage, dict[str, str]]]:
    """Return the pages, each with the cookies of its user."""
    cookies = {user: daemon.log_in(user, "user") for user in USERS}
    cookies |= {user: daemon.log_in(user, "operator") for user in OPERATORS}
    pages = []
    for path, number, for_operators in OPENED:
        for _, user in zip(range(number), cycle(OPERATORS if for_operators else USERS), strict=False):
            pages.append((OpenPage(path.replace("OWN", str(jobs.get(user))), user), cookies[user]))
    return pages


async def measure(daemon: Daemon, duration: float, *, with_pages: bool) -> tuple[float, list[float]]:
    """Return the share of a core that the daemon needs, and the delays of all changes on all pages."""
    jobs = {}
    for user in USERS:
        found = daemon.http.get("/queue.json", params={"q": f"user:{user} state:queued"}).raise_for_status().json()
        jobs[user] = int(found["jobs"][0]["id"])
    pages = open_pages(daemon, jobs) if with_pages else []
    client = httpx2.AsyncClient(base_url=daemon.url, limits=httpx2.Limits(max_connections=None), timeout=60)
    followers = [asyncio.create_task(page.follow(client, cookies)) for page, cookies in pages]
    users, held = cycle(USERS), list[tuple[float, str]]()

    def change(number: int, owner: str) -> None:
        """Hold a user's job, or drain a cluster; release the job that has been held longest."""
        path = f"jobs/{jobs[owner]}/hold" if owner else f"clusters/{DRAINED}/drain"
        daemon.http.post(f"/api/v1/{path}", json={"reason": f"change-{number}-"}).raise_for_status()

    start, began = 0.0, time.monotonic()
    settled = began + SETTLING_S
    number = int(time.time()) % 10**7 * 100
    while (now := time.monotonic()) < settled + duration:
        if not start and now >= settled:
            start, began = daemon.cpu_time(), now
            for page, _ in pages:
                page.delays.clear()
        number += 1
        if held and now - held[0][0] > HELD_S:
            await asyncio.to_thread(daemon.http.post, f"/api/v1/jobs/{jobs[held.pop(0)[1]]}/release", json={})
        else:
            owner = next(users) if number % 2 else ""
            await asyncio.to_thread(change, number, owner)
            held += [(now, owner)] if owner else []
            for page, _ in pages:
                if page.shows(owner):
                    page.awaited[number] = time.monotonic()
        await asyncio.sleep(max(0.0, now + CHANGE_INTERVAL_S - time.monotonic()))
    share = (daemon.cpu_time() - start) / (time.monotonic() - began)
    for follower in followers:
        follower.cancel()
    await client.aclose()
    ends = await asyncio.gather(*followers, return_exceptions=True)
    assert not (failures := [end for end in ends if isinstance(end, Exception)]), failures[0]
    await asyncio.to_thread(
        lambda: [daemon.http.post(f"/api/v1/jobs/{jobs[user]}/release", json={}) for _, user in held]
    )
    by_path: dict[str, list[float]] = {}
    for page, _ in pages:
        late = [now - at for at in page.awaited.values() if now - at > LOST_S]
        by_path.setdefault(re.sub(r"\d+$", "", page.path), []).extend(page.delays + late)
    for path, delays in by_path.items():
        if len(delays) > 1:
            print(
                f"{path:24} {statistics.median(delays):5.2f} {statistics.quantiles(delays, n=20)[-1]:5.2f} s",
                flush=True,
            )
    return share, [delay for delays in by_path.values() for delay in delays]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each measurement")
    given = parser.parse_args()
    with start_daemon("large", Path.cwd()) as daemon:
        idle, _ = asyncio.run(measure(daemon, given.seconds, with_pages=False))
        share, delays = asyncio.run(measure(daemon, given.seconds, with_pages=True))
    median, late = statistics.median(delays), statistics.quantiles(delays, n=20)[-1]
    figures = {
        "share": round(share - idle, 3),
        "share_without_pages": round(idle, 3),
        "delay_s": [round(median, 2), round(late, 2)],
        "delays": len(delays),
    }
    exceeded = [name for name, value in (("share", share - idle), ("delay_s", median)) if value > BUDGETS[name]]
    print(json.dumps({**figures, "budgets": BUDGETS, "exceeded": exceeded, "load": psutil.getloadavg()[0]}))


if __name__ == "__main__":
    main()
