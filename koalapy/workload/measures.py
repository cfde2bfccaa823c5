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


def planned_row(number: int, arrival: Arrival) -> Json:
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
        "arrives": arrival.arrives_at,
        "submitted": None,
        "late": None,
        "exit_code": None,
        "clusters": {},
        "coallocated": None,
        **dict.fromkeys((*TIMES, *COUNTS)),
    }


def measured_row(plan: Json, submitted: float, job: Json, attempts: Sequence[Json]) -> Json:
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
    placed = _parse_time(attempts[-1]["placed_at"])
    staged = [c["staged_at"] for c in attempts[-1]["components"] if c.get("staged_at")]
    return max((round(max(0.0, _parse_time(text) - placed), 3) for text in staged), default=0.0)


def _parse_time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


# Many jobs


def has_run(job: Json) -> bool:
    """Return whether the program of a job ran to its end: the job was neither aborted nor failed before its start."""
    ended_itself = job["state"] == "failed" and job.get("exit_code") is not None
    return job["state"] == "succeeded" or (ended_itself and job["wait_time"] is not None)


def compute_means(jobs: Sequence[Json]) -> Json:
    """Return the means over the jobs that ran to their end, and the number of all jobs by state."""
    ended = [job for job in jobs if job["state"] in ENDED]
    ran = [job for job in ended if has_run(job)]
    states = Counter(job["state"] for job in jobs)
    restarts = sum(job["restarts"] or 0 for job in ended)
    given_up = sum(job["state"] == "failed" and job["reason"].startswith(INFRASTRUCTURE_FAILURE) for job in ended)
    placed = [job for job in ran if job["coallocated"] is not None]
    result: Json = {"jobs": len(jobs), "states": dict(sorted(states.items())), "ran": len(ran)}
    result |= {name: mean_of(ran, name) for name in (*TIMES, *COUNTS)}
    result["coallocated"] = _round_or_none(_mean_or_none([bool(job["coallocated"]) for job in placed]))
    result["clusters_combined"] = _round_or_none(_mean_or_none([len(job["clusters"]) for job in placed]))
    # A job may fail more than once and still succeed, as counted in mohamed-2005.
    result["failures"] = _round_or_none((restarts + given_up) / (restarts + len(ended))) if ended else None
    response = sorted(job["response_time"] for job in ran if job["response_time"] is not None)
    result["response_quantiles"] = {f"{part:g}": _round_or_none(quantile_of(response, part)) for part in FRACTIONS}
    return result


def mean_of(jobs: Iterable[Json], name: str) -> float | None:
    """Return the mean of the known values; None if there are none."""
    return _round_or_none(_mean_or_none([job[name] for job in jobs if job[name] is not None]))


def group_jobs(jobs: Iterable[Json], key: Callable[[Json], Key]) -> dict[Key, list[Json]]:
    """Return the jobs by key, in the order of the keys."""
    groups: dict[Key, list[Json]] = {}
    for job in jobs:
        groups.setdefault(key(job), []).append(job)
    return dict(sorted(groups.items(), key=lambda item: _sort_key(item[0])))


def by_application(jobs: Sequence[Json]) -> list[Json]:
    """Return a row of mean values for each application."""
    return [
        {"application": name, **compute_means(group)}
        for name, group in group_jobs(jobs, lambda job: job["application"]).items()
    ]


def by_size(jobs: Sequence[Json]) -> list[Json]:
    """Return the means by total size, number of components and priority, as in mohamed-2005, figures 3 to 5."""
    groups = group_jobs(jobs, lambda job: (job["nodes"], job["components"], job["priority"]))
    names = ("nodes", "components", "priority")
    return [{**dict(zip(names, key, strict=True)), **compute_means(group)} for key, group in groups.items()]


def quantile_of(ordered: Sequence[float], part: float) -> float | None:
    """Return the smallest value that at least a fraction ``part`` of all values do not exceed; None without values."""
    if not ordered:
        return None
    return ordered[max(0, ceil(part * len(ordered) - 1e-9) - 1)]


def _mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _round_or_none(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _sort_key(key: Hashable) -> tuple[tuple[bool, Any], ...]:
    """Return a key by which None sorts before other values, also within tuples."""
    parts = key if isinstance(key, tuple) else (key,)
    return tuple((part is not None, part if part is not None else 0) for part in parts)


# Clusters over time


class Samples:
    """Node counts of the clusters over time; each sample holds until the next. One without clusters means unknown."""

    COLUMNS = ("total", "used", "background", "idle")

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        self.at: list[float] = list(content["at"]) if content else []
        self.clusters: dict[str, dict[str, list[int]]] = dict(content["clusters"]) if content else {}
        self._node_seconds = {
            name: {column: self._node_seconds_of(values) for column, values in columns.items()}
            for name, columns in self.clusters.items()
        }

    def _node_seconds_of(self, values: Sequence[int]) -> float:
        """Return the node-seconds of one column of counts."""
        spans = (later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False))
        return sum(value * span for value, span in zip(values, spans, strict=False))

    def add_sample(self, time: float, clusters: Iterable[Json]) -> None:
        """Append the node counts of the clusters at a time in seconds. Clusters that are not listed get zeros."""
        states = {cluster["name"]: _without_overlap(cluster) for cluster in clusters}
        for name in states.keys() - self.clusters.keys():
            self.clusters[name] = {column: [0] * len(self.at) for column in self.COLUMNS}
            self._node_seconds[name] = dict.fromkeys(self.COLUMNS, 0.0)
        self.at.append(round(time, 3))
        span = self.at[-1] - self.at[-2] if len(self.at) > 1 else 0.0
        for name, columns in self.clusters.items():
            now = states.get(name, {})
            for column, values in columns.items():
                self._node_seconds[name][column] += span * (values[-1] if values else 0)
                values.append(int(now.get(column, 0)))

    def to_json(self) -> Json:
        return {"at": self.at, "clusters": self.clusters}

    def cut_at(self, end: float) -> "Samples":
        """Return the samples up to a time in seconds."""
        count = sum(time <= end for time in self.at)
        clusters = {
            name: {column: values[:count] for column, values in columns.items()}
            for name, columns in self.clusters.items()
        }
        return Samples({"at": self.at[:count], "clusters": clusters})

    def utilisation(self) -> Json:
        """Return the fractions of nodes that jobs and local users used, by cluster and for all; None if unknown."""
        by_cluster = {name: self._utilisation_of([name]) for name in sorted(self.clusters)}
        return {"clusters": by_cluster, "all": self._utilisation_of(sorted(self.clusters))}

    def _utilisation_of(self, names: Sequence[str]) -> Json:
        """Return the nodes of these clusters, and the fractions that jobs and local users used; None if unknown."""
        offered = sum(self._node_seconds[name]["total"] for name in names)
        used, background = (
            sum(self._node_seconds[name][column] for name in names) / offered if offered else None
            for column in ("used", "background")
        )
        nodes = sum(max(self.clusters[name]["total"], default=0) for name in names)
        return {"nodes": nodes, "ours": _round_or_none(used), "background": _round_or_none(background)}


def _without_overlap(cluster: Json) -> Json:
    """Return the counts of a cluster, counting a node once that is promised to a job while another still has it."""
    unavailable = cluster["background"] + cluster.get("down", 0)
    return cluster | {"used": max(0, min(cluster["used"], cluster["total"] - unavailable))}


# Report


def report_of(jobs: Sequence[Json], samples: Samples, header: Json, run: Json) -> Json:
    """Return the report of a run. ``header`` is that of the workload; ``run`` contains the parameters of the run."""
    end = max(
        (job["submitted"] + job["response_time"] for job in jobs if job["response_time"] is not None), default=None
    )
    counted = samples if end is None or not run.get("complete") else samples.cut_at(end + 1.0)
    return {
        "koala_workload_report": 1,
        "run": run,
        "workload": header,
        "summary": compute_means(jobs),
        "utilisation": counted.utilisation(),
        "by_application": by_application(jobs),
        "by_size": by_size(jobs),
        "jobs": list(jobs),
        "samples": counted.to_json(),
    }


def label_of(report: Json, name: str) -> str:
    """Return the label of a run in comparisons: its policy, or its name if it has several policies or none."""
    policies = {job["policy"] for job in report["jobs"] if job["policy"]}
    return policies.pop() if len(policies) == 1 else name


def labels_of(reports: Sequence[tuple[str, Json]]) -> list[str]:
    """Return the labels of several runs: their policies if these are distinct, otherwise their names."""
    labels = [label_of(report, name) for name, report in reports]
    return labels if len(set(labels)) == len(labels) else [name for name, _ in reports]


def compare_reports(reports: Sequence[tuple[str, Json]]) -> Json:
    """Return a comparison with a row for each run and application.

    ``change`` is the relative change of the mean response time from the first run.
    """
    labels = labels_of(reports)
    first = _means_by_application(reports[0][1])
    rows: list[Json] = []
    for label, (_, report) in zip(labels, reports, strict=True):
        for name, group in _means_by_application(report).items():
            reference, now = first.get(name, {}).get("response_time"), group["response_time"]
            change = None if not reference or now is None or label == labels[0] else now / reference - 1
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


def _means_by_application(report: Json) -> dict[str, Json]:
    groups = {group["application"]: group for group in by_application(report["jobs"])}
    return groups if len(groups) < 2 else {**groups, "all": compute_means(report["jobs"])}
