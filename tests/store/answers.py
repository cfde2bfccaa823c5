"""Read the complete contents of stores, to compare two stores."""

from koalapy.model.history import NAMES, DayFilter, Figures, Key, Kind
from koalapy.store.opening import Stores
from koalapy.store.records import JobFilter
from koalapy.validation.submission import hash_key

KEYS = [hash_key(user, key) for user, key in (("ada", "key of 1"), ("bob", "key of 8"), ("cyd", "key of 9"))]


def read_contents(stores: Stores) -> dict[str, object]:
    """Return the contents of all stores, without statistics."""
    saved, ids = stores.jobs.load(), range(1, 25)
    pairs = [(source, target) for source in ("north", "south") for target in ("north", "south")]
    return {
        "unfinished": sorted(saved.jobs, key=lambda job: job.id),
        "saved": (saved.outbox, sorted(saved.clusters, key=lambda record: record.name), saved.next_job, saved.scans),
        "jobs": stores.jobs.page(JobFilter()).jobs,
        "job": [stores.jobs.job(ident) for ident in ids],
        "attempts": [stores.jobs.attempts(ident) for ident in ids],
        "timeline": [stores.jobs.timeline(ident) for ident in ids],
        "keys": stores.jobs.submitted(KEYS),
        "replicas": stores.files.replicas(),
        "bundles": stores.files.bundles(),
        "results": [stores.files.results(ident, 2) for ident in ids],
        "links": [stores.measurements.history(*pair, 10) for pair in pairs],
        "latest": stores.measurements.latest(),
        "advice": stores.advice.record("", 10),
        "runs": stores.advice.runs(10),
    }


def read_statistics(stores: Stores) -> list[object]:
    usage = stores.jobs.usage(0.0, 4000.0)
    expired_jobs = [stores.history.expired_jobs(5000.0, 100, internal=internal) for internal in (False, True)]
    return [
        usage.ended,
        usage.restarts,
        usage.mean_times,
        {cluster: round(seconds, 3) for cluster, seconds in usage.node_seconds.items()},
        expired_jobs,
        stores.history.ended_jobs((0.0, 0), 5000.0, 100),
    ]


def read_history(stores: Stores) -> list[dict[Key, list[float]]]:
    return [_round_figures(stores.history.days(DayFilter(kind, 0, 1000))) for kind in Kind]


def _round_figures(days: dict[Key, Figures]) -> dict[Key, list[float]]:
    rounded = {key: [round(getattr(figures, name), 3) for name in NAMES] for key, figures in days.items()}
    return {key: values for key, values in rounded.items() if any(values)}
