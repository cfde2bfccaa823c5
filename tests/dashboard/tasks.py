"""Play twelve tasks of an operator in Chromium, and print steps and seconds: ``python -m tests.dashboard.tasks``.

Each task begins on the overview. A step is a click, or a form that is filled, or a search that is typed and sent. The
seconds are those of the browser and the daemon, without the time in which a person reads and types.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import structlog
from playwright.sync_api import Error

from koalapy.model.limits import FairShareSettings
from koalapy.scheduler.fair_share import FairShares
from tests.dashboard.browser import Visitor, chromium
from tests.dashboard.scenes import serve_scene

MAX_STEPS = 5
MANY_NODES = 100
"""Nodes of the job of the visitor, for which others have to end."""


class Stopwatch:
    """A visitor whose steps are counted."""

    def __init__(self, visitor: Visitor) -> None:
        self.visitor, self.page, self.steps = visitor, visitor.page, 0

    def click(self, role: str, name: str, inside: str = "body") -> None:
        """Click the first element of a role and name."""
        self.steps += 1
        self.page.locator(inside).get_by_role(role, name=name).first.click()  # type: ignore[arg-type]

    def search(self, text: str) -> None:
        """Type a text into the search of the page and send it."""
        self.steps += 1
        self.page.locator("#search").fill(text)
        self.page.locator("#search").press("Enter")
        self.page.wait_for_url(lambda url: "/jobs/" in url or "/queue" in url)

    def fill(self, form: str, **values: str) -> None:
        """Fill fields of a form by their names."""
        self.steps += 1
        for name, value in values.items():
            field = self.page.locator(f"{form} [name={name}]").first
            if field.evaluate("node => node.localName") == "select":
                field.select_option(value)
            else:
                field.fill(value)

    def see(self, text: str, inside: str = "main") -> None:
        """Wait until the page shows a text."""
        self.page.locator(inside).get_by_text(text).and_(self.page.locator(":visible")).first.wait_for()


def cancel_jobs_of_user(watch: Stopwatch) -> None:
    watch.search("user:bruno state:waiting")
    watch.page.get_by_label("all jobs that match").check()
    watch.steps += 1
    watch.click("button", "Cancel…", "#jobs")
    watch.fill("main form", reason="too many at once")
    watch.click("button", "Cancel", "main form")
    watch.page.wait_for_url("**/queue/cancel")


def drain_tomorrow(watch: Stopwatch) -> None:
    watch.click("link", "Maintenance", "nav")
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 86400))
    times = {"begin": f"{day}T08:00", "end": f"{day}T12:00"}
    watch.fill("form[action='/maintenance']", cluster="delft-1", reason="new switch", **times)
    watch.click("button", "Drain it")
    watch.see("new switch")


def find_failed_job(watch: Stopwatch) -> None:
    watch.search(f"state:failed ended:{time.strftime('%Y-%m-%d', time.gmtime())}")
    watch.steps += 1
    watch.page.locator("main tr[data-href] a").first.click()
    watch.page.wait_for_url("**/jobs/*")
    watch.see("Output")


def submit_job(watch: Stopwatch) -> None:
    watch.click("link", "Jobs", "nav")
    watch.click("link", "New job")
    watch.fill(".job-form", nodes="4", command="./wave")
    watch.click("button", "Submit", ".job-form")
    watch.page.wait_for_url(lambda url: url.rpartition("/")[2].isdecimal())


def give_weight(watch: Stopwatch) -> None:
    watch.search("user:chen")
    watch.click("link", "Users", "nav")
    watch.click("link", "chen")
    watch.fill("#shares form", weight="3", reason="a deadline")
    watch.click("button", "Set it")
    watch.see("set by")


def silence_alert(watch: Stopwatch) -> None:
    watch.click("button", "Silence", "article")
    watch.see("silenced")


def compare_clusters(watch: Stopwatch) -> None:
    watch.click("link", "History", "nav")
    watch.click("link", "7 d", "main")
    names = watch.page.locator("form[aria-label=Selection] [name=name]")
    names.nth(0).fill("delft-1")
    names.nth(1).fill("leiden-1")
    watch.fill("form[aria-label=Selection]", by="cluster")
    watch.click("button", "Show")
    watch.see("delft-1")


def tasks(waiting: int, running: int) -> dict[str, Callable[[Stopwatch], Any]]:
    """Return the tasks by name."""
    return {
        "why does job X wait": lambda w: (w.search(str(waiting)), w.page.locator("p.reason").wait_for()),
        "which cluster is sick, and since when": lambda w: w.see("since", "article"),
        "drain a cluster tomorrow, 08:00 to 12:00": drain_tomorrow,
        "cancel all waiting jobs of a user": cancel_jobs_of_user,
        "a job that failed on a day, and its output": find_failed_job,
        "submit a job": submit_job,
        "watch a job": lambda w: (w.search(str(running)), w.page.wait_for_selector("#live[data-state=on]")),
        "compare the load of two clusters last week": compare_clusters,
        "silence an alert": silence_alert,
        "who uses the grid": lambda w: (w.click("link", "Users", "nav"), w.see("Share, 24 h", "thead")),
        "more weight for a user": give_weight,
        "when will my job start": lambda w: (w.click("link", "My jobs", "nav"), w.see("≈", "main tr")),
    }


def submit_waiting_job(http: httpx2.Client) -> None:
    """Submit a job that has to wait, and have the daemon forecast its start, as it does from time to time."""
    body = {"request": {"type": "flexible", "total_size": MANY_NODES}, "command": ["./wave"], "walltime": "1h"}
    job = http.post("/api/v1/jobs", json=body).raise_for_status().json()["id"]
    forecast = http.get(f"/api/v1/jobs/{job}/forecast?wait=60").raise_for_status().json()
    assert forecast["expected"]["starts"]["low"] > 1, forecast


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    shares = FairShares(FairShareSettings(users={"chen": 2.0}))
    with (
        TemporaryDirectory() as folder,
        serve_scene("sixty", Path(folder), shares=shares) as daemon,
        chromium() as browser,
    ):
        submit_waiting_job(daemon.http)
        visitor = Visitor(browser, daemon.url, daemon.admin_token)
        jobs = [
            visitor.page.request.get(f"/queue.json?q=state:{s}").json()["jobs"][0]["id"] for s in ("queued", "running")
        ]
        print("| task | steps | seconds |\n| --- | --- | --- |")
        for name, play in tasks(*jobs).items():
            watch = Stopwatch(visitor)
            watch.visitor.open("/")
            start = time.monotonic()
            watch.page.set_default_timeout(20_000)
            try:
                play(watch)
                took = f"{time.monotonic() - start:.1f}"
            except Error as error:  # the other tasks are played all the same
                took = f"failed at {watch.page.url}: {str(error).splitlines()[0]}"
            print(f"| {name} | {watch.steps}{' (too many)' if watch.steps > MAX_STEPS else ''} | {took} |", flush=True)


if __name__ == "__main__":
    main()
