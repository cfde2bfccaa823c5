"""The Prometheus metrics of ``/metrics``, their access and their bounded number."""

import asyncio
import re
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deploy.documentation import metrics_page
from deploy.documentation.metrics_page import EMPTY_FIGURES, LABEL_VALUES
from koalapy.api import monitoring
from koalapy.api.monitoring import list_metrics
from koalapy.model.identity import Identity, Role
from koalapy.scheduler.rules import Rules
from tests.needs import PROMETHEUS, needs
from tests.serving import Open, serving

Json = dict[str, Any]
PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
PROCESS_METRICS = {"process_cpu_seconds", "process_virtual_memory_bytes", "process_resident_memory_bytes"} | {
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
}


async def scrape_metrics(api: httpx2.AsyncClient) -> str:
    answer = await api.get("/metrics")
    assert answer.status_code == 200
    return answer.text


def value_of(text: str, sample: str, **labels: str) -> float:
    """Return the sum of a sample over all series with these labels."""
    values = [
        metric.value
        for family in text_string_to_metric_families(text)
        for metric in family.samples
        if metric.name == sample and labels.items() <= metric.labels.items()
    ]
    assert values, f"there is no {sample} with {labels}"
    return sum(values)


def test_metrics_page_shows_type_labels_and_meaning() -> None:
    rows = metrics_page.page().splitlines()
    metrics = list_metrics(EMPTY_FIGURES)
    assert len([row for row in rows if row.startswith("| `koala_")]) == len(metrics) > 45
    assert "| `koala_jobs` | gauge | `state`, `priority` | Unfinished jobs of users. |" in rows
    assert "| `koala_preemptions_total` | counter |  | Preempted low-priority jobs. |" in rows


@pytest.mark.parametrize("values", LABEL_VALUES.values())
def test_metrics_page_explains_each_label_value(values: type[StrEnum]) -> None:
    rows = metrics_page.page().splitlines()
    assert [value for value in values if not any(re.match(rf"\| `{value}` \| .{{4,}} \|$", row) for row in rows)] == []


def test_documentation_lists_process_metrics() -> None:
    assert all(f"`{name}" in PAGE for name in PROCESS_METRICS)


async def test_metrics_require_token(tmp_path: Path) -> None:
    people = {"of-ada": Identity("ada", Role.USER, "a test")}
    async with serving(tmp_path / "koala.db", [], Rules(), users=people) as api:
        refused = await api.get("/metrics")
        assert (refused.status_code, "koala_" in refused.text) == (401, False)
        wrong = await api.get("/metrics", headers={"Authorization": "Bearer another"})
        assert wrong.status_code == 401
        answer = await api.get("/metrics", headers={"Authorization": "Bearer of-ada"})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_open_metrics_setting_opens_metrics_only(tmp_path: Path) -> None:
    people = {"of-ada": Identity("ada", Role.USER, "a test")}
    async with serving(tmp_path / "koala.db", [], Rules(), users=people, open_metrics=True) as api:
        assert "koala_jobs" in await scrape_metrics(api)
        assert (await api.get("/api/v1/usage")).status_code == 401
        assert (await api.post("/metrics", json={})).status_code == 401


async def test_metrics_support_openmetrics_format(open_api: Open) -> None:
    api = await open_api()
    answer = await api.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.processes
@needs(PROMETHEUS)
async def test_promtool_accepts_metrics(open_api: Open) -> None:
    api = await open_api()
    text = await scrape_metrics(api)
    checked = await asyncio.to_thread(
        subprocess.run, ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr, checked.stdout) == (0, "", "")


async def test_metrics_count_jobs_requests_and_writes(open_api: Open, body: Json) -> None:
    api = await open_api()
    for priority in ("low", "high", "high"):
        assert (await api.post("/api/v1/jobs", json=body | {"priority": priority})).status_code == 201
    await api.post("/api/v1/jobs/1/hold")
    text = await scrape_metrics(api)
    assert value_of(text, "koala_jobs", state="queued", priority="high") == 2
    assert value_of(text, "koala_jobs", state="held", priority="low") == 1
    assert value_of(text, "koala_jobs_submitted_total") == 3
    assert value_of(text, "koala_refusals_total") > 0
    assert value_of(text, "koala_oldest_job_seconds", state="held") > 0
    assert value_of(text, "koala_events_total", kind="JobSubmitted") == 3
    await api.post("/api/v1/jobs/cancel", json={"jobs": [1, 2]})
    await api.post("/api/v1/jobs/1/hold")
    text = await scrape_metrics(api)
    assert value_of(text, "koala_jobs_ended_total", state="cancelled") == 2
    assert value_of(text, "koala_http_requests_total", route="/api/v1/jobs", method="POST", status="201") == 3
    assert value_of(text, "koala_http_request_seconds_count", route="/api/v1/jobs") == 3
    assert value_of(text, "koala_database_seconds_count", kind="write") >= 5
    assert value_of(text, "koala_round_seconds_count") >= value_of(text, "koala_database_seconds_count", kind="write")


async def test_metrics_do_not_grow_with_user_input(open_api: Open, body: Json) -> None:
    """Jobs, names, owners, paths and methods are chosen by users."""
    api = await open_api()

    async def count_series() -> int:
        families = text_string_to_metric_families(await scrape_metrics(api))
        return sum(len(family.samples) for family in families)

    async def attack(tag: str) -> None:
        fields = {"name": f"name-{tag}", "owner": f"owner-{tag}", "application": f"app-{tag}"}
        await api.post("/api/v1/jobs", json=body | fields)
        await api.get(f"/api/v1/jobs/{tag}")
        await api.get(f"/{tag}")
        await api.get(f"/api/v1/jobs?name={tag}")
        await api.request(f"M{tag}", "/healthz")
        await api.request(f"M{tag}", f"/{tag}")
        await api.get("/healthz", headers={"Host": tag})
        await api.get("/metrics", headers={"Accept": f"text/{tag}"})

    await count_series()
    await attack("a")
    series_count = await count_series()
    for number in range(30):
        await attack(f"b{number}")
    assert await count_series() == series_count


async def test_scrapes_within_the_interval_compute_the_figures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0

    async def compute(*_: object) -> list[Metric]:
        nonlocal computed
        computed += 1
        return list_metrics(EMPTY_FIGURES)

    monkeypatch.setattr(monitoring, "collect_metrics", compute)
    scrapes = monitoring.MetricsCache(None, None, None, min_interval_s=1000.0)  # type: ignore[arg-type]
    texts = await asyncio.gather(*(scrapes.encode("text/plain") for _ in range(20)))
    assert (computed, len(set(texts))) == (1, 1)
