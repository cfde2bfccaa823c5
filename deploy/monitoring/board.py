"""Write the board for Grafana, ``koala-board.json``: ``python -m deploy.monitoring.board``."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARD = Path(__file__).with_name("koala-board.json")
INTERVAL = "$__rate_interval"
"""Grafana replaces this by at least four times the scrape interval."""
SOURCE = {"type": "prometheus", "uid": "${source}"}
TOGETHER = 'coallocated="yes"'
WIDTH, HEIGHT = 8, 7
"""Width of a panel in columns; three panels fill a row."""


@dataclass(frozen=True, slots=True)
class Line:
    """A query and the name of its line."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart; ``unit`` is a unit of Grafana."""

    title: str
    lines: Sequence[Line]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and its panels."""

    title: str
    panels: Sequence[Panel]


def _rate(counter: str, label: str = "", matching: str = "") -> str:
    inner = f"rate({counter}{{{matching}}}[{INTERVAL}])" if matching else f"rate({counter}[{INTERVAL}])"
    return f"sum by ({label}) ({inner})" if label else f"sum({inner})"


def _quantiles(histogram: str, matching: str = "") -> list[Line]:
    return [
        Line(f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', 'le', matching)})", f"{share:.0%}")
        for share in (0.5, 0.95, 0.99)
    ]


def _mean(seconds: str, count: str, label: str) -> str:
    return f"{_rate(seconds, label)} / {_rate(count, label)}"


ROWS = (
    Row(
        "Now",
        [
            Panel("Ready", [Line("koala_ready")], kind="stat"),
            Panel("Alerts", [Line("sum by (kind, severity) (koala_alerts) > 0 or vector(0)", "{{kind}}")], kind="stat"),
            Panel(
                "Waiting and active jobs",
                [
                    Line('sum(koala_jobs{state=~"queued|held"})', "waiting"),
                    Line('sum(koala_jobs{state!~"queued|held"})', "active"),
                ],
                kind="stat",
            ),
        ],
    ),
    Row(
        "Jobs",
        [
            Panel("Jobs by state", [Line("sum by (state) (koala_jobs)", "{{state}}")], stacked=True),
            Panel("Age of the oldest job by state", [Line("koala_oldest_job_seconds", "{{state}}")], unit="s"),
            Panel(
                "Submitted and ended jobs per second",
                [
                    Line(_rate("koala_jobs_submitted_total"), "submitted"),
                    Line(_rate("koala_jobs_ended_total", "state"), "{{state}}"),
                ],
            ),
            Panel(
                "Placements by policy", [Line(_rate("koala_placements_total", "policy"), "{{policy}}")], stacked=True
            ),
            Panel(
                "Share of co-allocated placements",
                [
                    Line(
                        f"{_rate('koala_placements_total', matching=TOGETHER)} / {_rate('koala_placements_total')}",
                        "share",
                    )
                ],
                unit="percentunit",
            ),
            Panel("Failed placement tries by reason", [Line(_rate("koala_refusals_total", "reason"), "{{reason}}")]),
        ],
    ),
    Row(
        "Clusters",
        [
            Panel("Nodes", [Line("sum by (kind) (koala_nodes)", "{{kind}}")], stacked=True),
            Panel(
                "Share of nodes used by this scheduler",
                [
                    Line(
                        'sum by (cluster) (koala_nodes{kind="ours"}) / sum by (cluster) (koala_cluster_nodes)',
                        "{{cluster}}",
                    )
                ],
                unit="percentunit",
            ),
            Panel("State of clusters", [Line("koala_cluster_state == 1", "{{cluster}} {{state}}")], kind="stat"),
            Panel(
                "Failed claims", [Line(_rate("koala_claims_failed_total", "cluster, cause"), "{{cluster}} {{cause}}")]
            ),
            Panel(
                "Failed attempts",
                [Line(_rate("koala_attempts_failed_total", "cluster, cause"), "{{cluster}} {{cause}}")],
            ),
            Panel("Age of agents' reports", [Line("koala_agent_report_age_seconds", "{{cluster}}")], unit="s"),
            Panel(
                "Mean duration of resource manager calls",
                [
                    Line(
                        _mean("koala_lrm_call_seconds_total", "koala_lrm_calls_total", "cluster, operation"),
                        "{{cluster}} {{operation}}",
                    )
                ],
                unit="s",
            ),
            Panel(
                "Longest resource manager calls",
                [Line("max by (cluster, operation) (koala_lrm_call_longest_seconds)", "{{cluster}} {{operation}}")],
                unit="s",
            ),
            Panel(
                "Failed resource manager calls",
                [Line(_rate("koala_lrm_calls_failed_total", "cluster, operation"), "{{cluster}} {{operation}}")],
            ),
            Panel("Unacknowledged commands", [Line("koala_outbox", "{{cluster}}")]),
            Panel("Missing input files", [Line("koala_transfer_missing_bytes", "missing")], unit="bytes"),
            Panel(
                "Bandwidth of transfers",
                [Line(_rate("koala_transferred_bytes_total", "source, cluster"), "{{source}} to {{cluster}}")],
                unit="Bps",
            ),
        ],
    ),
    Row(
        "Daemon",
        [
            Panel("Engine cycles", [*_quantiles("koala_round_seconds")], unit="s"),
            Panel("Blocking part of engine cycles", [*_quantiles("koala_step_seconds")], unit="s"),
            Panel(
                "Events",
                [Line(_rate("koala_events_total", "kind"), "{{kind}}"), Line("koala_waiting_events", "waiting")],
            ),
            Panel("Database writes", [*_quantiles("koala_database_seconds", 'kind="write"')], unit="s"),
            Panel("Database reads", [*_quantiles("koala_database_seconds", 'kind="read"')], unit="s"),
            Panel("Database size", [Line("koala_database_bytes", "database")], unit="bytes"),
            Panel("Requests", [Line(_rate("koala_http_requests_total", "status"), "{{status}}")], stacked=True),
            Panel(
                "Mean time to the response",
                [
                    Line(
                        _mean("koala_http_request_seconds_sum", "koala_http_request_seconds_count", "route"),
                        "{{route}}",
                    )
                ],
                unit="s",
            ),
            Panel(
                "Free disk space", [Line("koala_disk_free_bytes / koala_disk_bytes", "{{disk}}")], unit="percentunit"
            ),
            Panel("Processor", [Line(f"rate(process_cpu_seconds_total[{INTERVAL}])", "cores")]),
            Panel("Memory", [Line("process_resident_memory_bytes", "resident")], unit="bytes"),
            Panel("Open files", [Line("process_open_fds", "open"), Line("process_max_fds", "limit")]),
        ],
    ),
)


def board() -> dict[str, Any]:
    """Return the board in Grafana's import format."""
    return {
        "title": "koala",
        "uid": "koala",
        "tags": ["koala"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        }
        top += 1
        for index, panel in enumerate(row.panels):
            number += 1
            across, down = index % (24 // WIDTH), index // (24 // WIDTH)
            place = {"x": across * WIDTH, "y": top + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield _panel(panel, number) | {"gridPos": place}
        top += -(-len(row.panels) // (24 // WIDTH)) * HEIGHT


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": line.expression, "legendFormat": line.legend}
            for index, line in enumerate(panel.lines)
        ],
    }


def text() -> str:
    """Return the content of the file."""
    return json.dumps(board(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text(), encoding="utf-8")
