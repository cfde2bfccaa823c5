"""The metrics of semantics 12, of one job and of many, from what the daemon tells. Spans are in seconds."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from math import ceil
from statistics import fmean
from typing import Any, TypeVar

from koalapy.workload.plan import Arrival, components_of, nodes_of

INFRASTRUCTURE_FAILURE = "infrastructure-failure:"
"""How the reason of a job begins that the scheduler has given up, since its attempts failed by the infrastructure."""

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
"""Of a job, with their means. Queue time is what mohamed-2005 calls placement time; response = wait + execution."""
COUNTS = ("placement_tries", "claiming_tries", "restarts")
ENDED = ("succeeded", "failed")
FRACTIONS = (0.5, 0.95)


# One job


def planned(number: int, arrival: Arrival) -> Json:
    """A job of which no more is known than what was planned."""
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
    """The same with what became of it; ``submitted`` in seconds from the beginning, ``attempts`` in order."""
    response, wait = job.get("response_time"), job.get("wait_time")
    started = wait is not None
    # Of a job that was cancelled in the queue the last attempt's places say nothing.
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
    """From the last attempt's placement until the last of its files was there; 0 without files."""
    if not attempts:
        return None
    placed = _moment(attempts[-1]["placed_at"])
    there = [c["staged_at"] for c in attempts[-1]["components"] if c.get("staged_at")]
    return max((round(max(0.0, _moment(at) - placed), 3) for at in there), default=0.0)


def _moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


# Many jobs


def has_run(job: Json) -> bool:
    """Whether its program came to an end of its own; others fail before they are placed, or are aborted."""
    ended_itself = job["state"] == "failed" and job.get("exit_code") is not None
    return job["state"] == "succeeded" or (ended_itself and job["wait_time"] is not None)


def means(jobs: Sequence[Json]) -> Json:
    """Means over the jobs that ran to an end of their own, and how all of them ended."""
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
    # As mohamed-2005 counts: a job may fail more than once, and runs well in the end.
    told["failures"] = _rounded(failures / attempts) if ended else None
    response = sorted(job["response_time"] for job in ran if job["response_time"] is not None)
    told["response_quantiles"] = {f"{part:g}": _rounded(quantile(response, part)) for part in FRACTIONS}
    return told


def _failures(job: Json) -> int:
    """Attempts that failed; the last one of a job that was given up is none of its restarts."""
    given_up = bool(job["state"] == "failed" and job["reason"].startswith(INFRASTRUCTURE_FAILURE))
    return int(job["restarts"] or 0) + given_up


def mean_of(jobs: Iterable[Json], name: str) -> float | None:
    """Of what is known."""
    return _rounded(_mean([job[name] for job in jobs if job[name] is not None]))


def grouped(jobs: Iterable[Json], key: Callable[[Json], Key]) -> dict[Key, list[Json]]:
    """In the order of their keys."""
    groups: dict[Key, list[Json]] = {}
    for job in jobs:
        groups.setdefault(key(job), []).append(job)
    return dict(sorted(groups.items(), key=lambda item: _sortable(item[0])))


def by_application(jobs: Sequence[Json]) -> list[Json]:
    return [{"application": name, **means(own)} for name, own in grouped(jobs, lambda job: job["application"]).items()]


def by_size(jobs: Sequence[Json]) -> list[Json]:
    """By total size, number of components and priority, as in mohamed-2005's figures 3 to 5."""
    groups = grouped(jobs, lambda job: (job["nodes"], job["components"], job["priority"]))
    names = ("nodes", "components", "priority")
    return [{**dict(zip(names, key, strict=True)), **means(own)} for key, own in groups.items()]


def quantile(ordered: Sequence[float], part: float) -> float | None:
    """The smallest value that at least ``part`` of all do not exceed."""
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


# The clusters over time


class Samples:
    """What the clusters said, look by look; each holds until the next one. One at none says that nothing is known."""

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
        """Those up to a moment."""
        kept = sum(at <= end for at in self.at)
        clusters = {
            name: {column: values[:kept] for column, values in columns.items()}
            for name, columns in self.clusters.items()
        }
        return Samples({"at": self.at[:kept], "clusters": clusters})

    def utilisation(self) -> Json:
        """Of each cluster and of all: fractions of the nodes that our jobs and local users had; None if not known."""
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
    """Its counts, with nodes that were promised to one job while another still has them counted once."""
    others = cluster["background"] + cluster.get("down", 0)
    return cluster | {"used": max(0, min(cluster["used"], cluster["total"] - others))}


# The report


def report_of(jobs: Sequence[Json], samples: Samples, header: Json, run: Json) -> Json:
    """Everything about one run: ``header`` is the workload's, ``run`` says how it was run."""
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
