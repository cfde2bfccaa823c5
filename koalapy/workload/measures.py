"""The metrics of semantics 12 for one job and for many, from the daemon's data. Times are in seconds."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from math import ceil
from statistics import fmean
from typing import Any, TypeVar

from koalapy.workload.plan import Arrival, components_of, nodes_of

INFRASTRUCTURE_FAILURE = "infrastructure-failure:"
"""Prefix of the reason of a job that the scheduler gave up after its attempts failed by the infrastructure."""

Json = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)

TIMES = (
    "queue_time",
    "startup_overhead",
    "wait_time",
    "execution_time",
    "response_time",
    "start_delay",
    "transfer_time",
)
"""Times of a job that are averaged. Queue time is the placement time of mohamed-2005; response = wait + execution."""
COUNTS = ("placement_tries", "claiming_tries", "restarts")
ENDED = ("succeeded", "failed")
FRACTIONS = (0.5, 0.95)


# One job


def planned(number: int, arrival: Arrival) -> Json:
    """Return the row of a job that was not submitted yet."""
    return {
        "number": number,
        "id": None,
        "application": arrival.application,
        "nodes": nodes_of(arrival.job),
        "components": components_of(arrival.job),
        "priority": arrival.job.get("priority", "low"),
        "policy": arrival.job.get("policy", ""),
        "state": "not submitted",
        "reason": "",
        "arrives": arrival.at,
        "submitted": None,
        "late": None,
        "exit_code": None,
        "clusters": {},
        "coallocated": None,
        **dict.fromkeys((*TIMES, *COUNTS)),
    }


def measured(plan: Json, submitted: float, job: Json, attempts: Sequence[Json]) -> Json:
    """Return the row of a job with the daemon's data.

    ``submitted`` is in seconds from the beginning of the run; ``attempts`` are in order.
    """
    response, wait = job.get("response_time"), job.get("wait_time")
    started = wait is not None
    # If a job was cancelled in the queue, the clusters of its last attempt are irrelevant.
    places = Counter[str]()
    for component in job.get("components", ()):
        places[component["cluster"]] += component["size"]
    return plan | {
        "id": job["id"],
        "components": components_of(job),
        "state": job["state"],
        "policy": job.get("policy") or plan["policy"],
        "reason": job.get("reason", ""),
        "submitted": round(submitted, 3),
        "late": round(max(0.0, submitted - plan["arrives"]), 3),
        "exit_code": job.get("exit_code"),
        "queue_time": job.get("queue_time"),
        "startup_overhead": job.get("startup_overhead"),
        "wait_time": wait,
        "execution_time": None if response is None or wait is None else round(response - wait, 6),
        "response_time": response,
        "start_delay": job.get("start_delay"),
        "transfer_time": _transfer_time(attempts),
        "clusters": dict(sorted(places.items())) if started else {},
        "coallocated": len(places) > 1 if started else None,
        **{name: job.get(name) for name in COUNTS},
    }


def _transfer_time(attempts: Sequence[Json]) -> float | None:
    """Return the seconds from the last placement until its last file was staged: 0 without files, None if unplaced."""
    if not attempts:
        return None
    placed = _moment(attempts[-1]["placed_at"])
    there = [c["staged_at"] for c in attempts[-1]["components"] if c.get("staged_at")]
    return max((round(max(0.0, _moment(at) - placed), 3) for at in there), default=0.0)


def _moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


# Many jobs


def has_run(job: Json) -> bool:
    """Return whether the program of a job ran to its end: the job was neither aborted nor failed before its start."""
    ended_itself = job["state"] == "failed" and job.get("exit_code") is not None
    return job["state"] == "succeeded" or (ended_itself and job["wait_time"] is not None)


def means(jobs: Sequence[Json]) -> Json:
    """Return the means over the jobs that ran to their end, and the number of all jobs by state."""
    ended = [job for job in jobs if job["state"] in ENDED]
    ran = [job for job in ended if has_run(job)]
    states = Counter(job["state"] for job in jobs)
    failures = sum(_failures(job) for job in ended)
    attempts = sum((job["restarts"] or 0) + 1 for job in ended)
    placed = [job for job in ran if job["coallocated"] is not None]
    told: Json = {"jobs": len(jobs), "states": dict(sorted(states.items())), "ran": len(ran)}
    told |= {name: mean_of(ran, name) for name in (*TIMES, *COUNTS)}
    told["coallocated"] = _rounded(_mean([bool(job["coallocated"]) for job in placed]))
    told["clusters_combined"] = _rounded(_mean([len(job["clusters"]) for job in placed]))
    # A job may fail more than once and still succeed, as counted in mohamed-2005.
    told["failures"] = _rounded(failures / attempts) if ended else None
    response = sorted(job["response_time"] for job in ran if job["response_time"] is not None)
    told["response_quantiles"] = {f"{part:g}": _rounded(quantile(response, part)) for part in FRACTIONS}
    return told


def _failures(job: Json) -> int:
    """Return the number of failed attempts: the restarts, and the last attempt of a job that was given up."""
    given_up = bool(job["state"] == "failed" and job["reason"].startswith(INFRASTRUCTURE_FAILURE))
    return int(job["restarts"] or 0) + given_up


def mean_of(jobs: Iterable[Json], name: str) -> float | None:
    """Return the mean of the known values; None if there are none."""
    return _rounded(_mean([job[name] for job in jobs if job[name] is not None]))


def grouped(jobs: Iterable[Json], key: Callable[[Json], Key]) -> dict[Key, list[Json]]:
    """Return the jobs by key, in the order of the keys."""
    groups: dict[Key, list[Json]] = {}
    for job in jobs:
        groups.setdefault(key(job), []).append(job)
    return dict(sorted(groups.items(), key=lambda item: _sortable(item[0])))


def by_application(jobs: Sequence[Json]) -> list[Json]:
    return [{"application": name, **means(own)} for name, own in grouped(jobs, lambda job: job["application"]).items()]


def by_size(jobs: Sequence[Json]) -> list[Json]:
    """Return the means by total size, number of components and priority, as in mohamed-2005, figures 3 to 5."""
    groups = grouped(jobs, lambda job: (job["nodes"], job["components"], job["priority"]))
    names = ("nodes", "components", "priority")
    return [{**dict(zip(names, key, strict=True)), **means(own)} for key, own in groups.items()]


def quantile(ordered: Sequence[float], part: float) -> float | None:
    """Return the smallest value that at least a fraction ``part`` of all values do not exceed; None without values."""
    if not ordered:
        return None
    return ordered[max(0, ceil(part * len(ordered) - 1e-9) - 1)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _sortable(key: Hashable) -> tuple[tuple[bool, Any], ...]:
    parts = key if isinstance(key, tuple) else (key,)
    return tuple((part is not None, part if part is not None else 0) for part in parts)


# Clusters over time


class Samples:
    """Node counts of the clusters over time; each sample holds until the next. One without clusters means unknown."""

    COLUMNS = ("total", "used", "background", "idle")

    def __init__(self, told: Mapping[str, Any] | None = None) -> None:
        self.at: list[float] = list(told["at"]) if told else []
        self.clusters: dict[str, dict[str, list[int]]] = dict(told["clusters"]) if told else {}
        self._node_seconds = {
            name: {column: self._sum(values) for column, values in columns.items()}
            for name, columns in self.clusters.items()
        }

    def _sum(self, values: Sequence[int]) -> float:
        spans = (after - at for at, after in zip(self.at, self.at[1:], strict=False))
        return sum(value * span for value, span in zip(values, spans, strict=False))

    def add(self, at: float, clusters: Iterable[Json]) -> None:
        known = {cluster["name"]: _held(cluster) for cluster in clusters}
        for name in known.keys() - self.clusters.keys():
            self.clusters[name] = {column: [0] * len(self.at) for column in self.COLUMNS}
            self._node_seconds[name] = dict.fromkeys(self.COLUMNS, 0.0)
        self.at.append(round(at, 3))
        span = self.at[-1] - self.at[-2] if len(self.at) > 1 else 0.0
        for name, columns in self.clusters.items():
            now = known.get(name, {})
            for column, values in columns.items():
                self._node_seconds[name][column] += span * (values[-1] if values else 0)
                values.append(int(now.get(column, 0)))

    def told(self) -> Json:
        return {"at": self.at, "clusters": self.clusters}

    def until(self, end: float) -> "Samples":
        """Return the samples up to a time in seconds."""
        kept = sum(at <= end for at in self.at)
        clusters = {
            name: {column: values[:kept] for column, values in columns.items()}
            for name, columns in self.clusters.items()
        }
        return Samples({"at": self.at[:kept], "clusters": clusters})

    def utilisation(self) -> Json:
        """Return the fractions of nodes that jobs and local users used, by cluster and for all; None if unknown."""
        told = {name: self._of([name]) for name in sorted(self.clusters)}
        return {"clusters": told, "all": self._of(sorted(self.clusters))}

    def _of(self, names: Sequence[str]) -> Json:
        offered = sum(self._node_seconds[name]["total"] for name in names)
        used, background = (
            sum(self._node_seconds[name][column] for name in names) / offered if offered else None
            for column in ("used", "background")
        )
        nodes = sum(max(self.clusters[name]["total"], default=0) for name in names)
        return {"nodes": nodes, "ours": _rounded(used), "background": _rounded(background)}


def _held(cluster: Json) -> Json:
    """Return the counts of a cluster, counting a node once that is promised to a job while another still has it."""
    others = cluster["background"] + cluster.get("down", 0)
    return cluster | {"used": max(0, min(cluster["used"], cluster["total"] - others))}


# Report


def report_of(jobs: Sequence[Json], samples: Samples, header: Json, run: Json) -> Json:
    """Return the report of a run. ``header`` is that of the workload; ``run`` contains the parameters of the run."""
    end = max(
        (job["submitted"] + job["response_time"] for job in jobs if job["response_time"] is not None), default=None
    )
    seen = samples if end is None or not run.get("complete") else samples.until(end + 1.0)
    return {
        "koala_workload_report": 1,
        "run": run,
        "workload": header,
        "summary": means(jobs),
        "utilisation": seen.utilisation(),
        "by_application": by_application(jobs),
        "by_size": by_size(jobs),
        "jobs": list(jobs),
        "samples": seen.told(),
    }


def label_of(report: Json, name: str) -> str:
    """Return the label of a run in comparisons: its policy, or its name if it has several policies or none."""
    policies = {job["policy"] for job in report["jobs"] if job["policy"]}
    return policies.pop() if len(policies) == 1 else name


def labels_of(reports: Sequence[tuple[str, Json]]) -> list[str]:
    """Return the labels of several runs: their policies if these are distinct, otherwise their names."""
    labels = [label_of(report, name) for name, report in reports]
    return labels if len(set(labels)) == len(labels) else [name for name, _ in reports]


def compare(reports: Sequence[tuple[str, Json]]) -> Json:
    """Return a comparison with a row for each run and application.

    ``change`` is the relative change of the mean response time from the first run.
    """
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
