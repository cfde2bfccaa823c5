"""Several runs side by side, from their reports."""

from collections.abc import Sequence
from typing import Any

from koalapy.workload.measures import by_application, means

Json = dict[str, Any]


def label_of(report: Json, name: str) -> str:
    """What a run is called beside others: its policy, or where there is not just one, its own name."""
    policies = {job["policy"] for job in report["jobs"] if job["policy"]}
    return policies.pop() if len(policies) == 1 else name


def labels_of(reports: Sequence[tuple[str, Json]]) -> list[str]:
    """The same for all: their names, where their policies do not tell them apart."""
    labels = [label_of(report, name) for name, report in reports]
    return labels if len(set(labels)) == len(labels) else [name for name, _ in reports]


def compare(reports: Sequence[tuple[str, Json]]) -> Json:
    """A row for each run and application; ``change`` of the mean response time against the first run."""
    labels = labels_of(reports)
    first = _groups(reports[0][1])
    rows: list[Json] = []
    for label, (_, report) in zip(labels, reports, strict=True):
        for name, group in _groups(report).items():
            before, now = first.get(name, {}).get("response_time"), group["response_time"]
            change = None if not before or now is None or label == labels[0] else now / before - 1
            rows.append({"run": label, **group, "application": name, "change": change})
    rows.sort(key=lambda row: row["application"] == "all")
    runs = [
        {
            "label": label,
            "name": name,
            "seconds": report["run"]["seconds"],
            **report["utilisation"]["all"],
            "incomplete": report["run"]["interrupted"],
        }
        for label, (name, report) in zip(labels, reports, strict=True)
    ]
    return {"koala_workload_comparison": 1, "runs": runs, "rows": rows}


def _groups(report: Json) -> dict[str, Json]:
    groups = {group["application"]: group for group in by_application(report["jobs"])}
    return groups if len(groups) < 2 else {**groups, "all": means(report["jobs"])}
