"""Measure queries of a database with a million ended and ten thousand active jobs.

``KOALA_BENCH_JOBS`` sets the number of ended jobs, ``KOALA_BENCH_DATABASE`` the URL of a database of ``many_jobs``.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.model.audit import AuditFilter
from koalapy.model.history import DAY, DayFilter, HistoryFilter, HistorySort, Kind, day_of
from koalapy.model.job import FINAL_STATES, JobState
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.opening import Stores, stores_in_database
from koalapy.store.output import OutputStore
from koalapy.store.records import JobFilter
from tests.benchmarks.many_jobs import ENDED, RARE_NAME, make_database

pytestmark = pytest.mark.nightly

ACTIVE_STATES = tuple(str(state) for state in JobState if state not in FINAL_STATES)
ENDED_STATES = tuple(str(state) for state in FINAL_STATES)
PAGES: dict[str, JobFilter] = {
    "newest": JobFilter(),
    "far back": JobFilter(before=ENDED // 2),
    "of an owner of many": JobFilter(owner="ada"),
    "of an owner of few": JobFilter(owner=RARE_NAME),
    "of a name": JobFilter(name="study-7"),
    "active": JobFilter(states=ACTIVE_STATES),
    "failed": JobFilter(states=("failed",)),
    "of an application, over": JobFilter(states=ENDED_STATES, application="app3", limit=101),
    "restarted, over": JobFilter(states=ENDED_STATES, min_restarts=1, limit=101),
    "restarted very often, over": JobFilter(states=ENDED_STATES, min_restarts=1000, limit=101),
    "of high priority, over": JobFilter(states=ENDED_STATES, priority="high", limit=101),
    "on a large cluster": JobFilter(cluster="north"),
    "on a small cluster": JobFilter(cluster="far"),
    "of an owner and a name": JobFilter(owner="ada", name="study-7"),
    "of an owner on a small cluster": JobFilter(owner="ada", cluster="far"),
    "of an owner, failed on a cluster": JobFilter(owner="ada", cluster="north", states=("failed",)),
}
WEEK, YEAR = 7 * DAY, 365 * DAY
HISTORY: dict[str, tuple[float, dict[str, Any]]] = {
    "a week": (WEEK, {}),
    "a year": (YEAR, {}),
    "a thousand of a year": (YEAR, {"limit": 1000}),
    "an owner of many": (YEAR, {"owner": "ada"}),
    "an owner of few": (YEAR, {"owner": RARE_NAME}),
    "a name": (YEAR, {"name": "study-7"}),
    "names": (YEAR, {"name": "study-11*"}),
    "names that are rare": (YEAR, {"name": f"*{RARE_NAME}"}),
    "failed": (YEAR, {"states": (JobState.FAILED,)}),
    "not succeeded": (YEAR, {"states": (JobState.FAILED, JobState.CANCELLED)}),
    "a small cluster": (YEAR, {"cluster": "far"}),
    "an owner, cancelled on a cluster": (YEAR, {"owner": "ada", "cluster": "north", "states": (JobState.CANCELLED,)}),
    "sums of a week": (WEEK, {"with_sums": True}),
    "sums of a year": (YEAR, {"with_sums": True}),
    "sums of an owner": (YEAR, {"with_sums": True, "owner": "ada"}),
    "sums of a cluster": (YEAR, {"with_sums": True, "cluster": "north"}),
    "sums of failed jobs of a cluster": (YEAR, {"with_sums": True, "cluster": "north", "states": (JobState.FAILED,)}),
    "most node-hours": (YEAR, {"sort": HistorySort.NODE_HOURS}),
    "least efficient of an owner": (YEAR, {"sort": HistorySort.EFFICIENCY, "owner": "ada"}),
}
"""Span until now in seconds, and the rest of the filter."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    folder: Path = tmp_path_factory.mktemp("many-jobs")
    url = os.environ.get("KOALA_BENCH_DATABASE", "")
    if not url:
        url = f"sqlite:///{folder / 'koala.db'}"
        make_database(url, int(os.environ.get("KOALA_BENCH_JOBS", ENDED)))
    database = Database(make_engine(url))
    yield stores_in_database(database, OutputStore(folder / "output", 1000))
    database.close()


def list_queries() -> dict[str, Callable[[Stores], Any]]:
    now = time.time()
    today = day_of(now)
    queries: dict[str, Callable[[Stores], Any]] = {
        f"page: {name}": (lambda stores, query_filter=query_filter: stores.jobs.page(query_filter))
        for name, query_filter in PAGES.items()
    }
    for name, start in (("an hour", now - 3600), ("a day", now - DAY), ("a year", (today - 365) * DAY)):
        queries[f"metrics of {name}"] = lambda stores, start=start: stores.jobs.usage(start, now)
    for kind in Kind:
        week = DayFilter(kind, today - 365, today, days=7)
        queries[f"history of a year by {kind}"] = lambda stores, query_filter=week: stores.history.days(query_filter)
    for name, (span, changes) in HISTORY.items():
        which = HistoryFilter(now - span, now, **changes)
        queries[f"ended jobs: {name}"] = lambda stores, which=which: stores.history.ended_page(which)
    return queries | {
        "timeline": lambda stores: stores.jobs.timeline(1000),
        "attempts": lambda stores: stores.jobs.attempts(1000),
        "audit of an hour": lambda stores: stores.audit.audit_entries(AuditFilter(since=now - 3 * 3600)),
        "audit of one user": lambda stores: stores.audit.audit_entries(AuditFilter(actor=RARE_NAME)),
        "advice": lambda stores: stores.advice.record("app3", 100),
        "applications of an owner": lambda stores: stores.advice.applications_of("ada"),
        "sizes of results": lambda stores: stores.files.results_sizes(),
        "start: active jobs": lambda stores: stores.jobs.load(),
        "start: what the advisor learns": lambda stores: stores.advice.runs(5000),
    }


@pytest.mark.parametrize("name", list(list_queries()))
def test_query_time_with_a_million_jobs(stores: Stores, benchmark: Any, name: str) -> None:
    """Run a query five times. ``extra_info`` has the processor seconds, which do not depend on other processes."""
    query, times = list_queries()[name], []

    def timed() -> None:
        began = time.thread_time()
        query(stores)
        times.append(time.thread_time() - began)

    benchmark.pedantic(timed, rounds=5, warmup_rounds=1)
    benchmark.extra_info["cpu_seconds"] = min(times)
