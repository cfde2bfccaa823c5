"""The page Scheduler: durations of engine cycles, decisions, failed placement tries, and the rules."""

import re
from collections import Counter
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

from koalapy.daemon.observability.instruments import Instruments
from koalapy.daemon.observability.timings import BUCKETS, RECENT_SPAN, Timings
from koalapy.dashboard.dashboard import Dashboard, View
from koalapy.dashboard.rendering import format_quantity, format_seconds
from koalapy.model.job import FINAL_STATES
from koalapy.model.job_spec import Priority
from koalapy.model.placement import RefusalKind
from koalapy.model.request import ClusterName
from koalapy.scheduler.rules import Rules

REASONS = {
    RefusalKind.NODES: "too few nodes are idle where the job may run",
    RefusalKind.CLUSTERS: "no cluster is usable",
    RefusalKind.FILES: "an input file is not available",
    RefusalKind.ELIGIBILITY: "the job may not run there: accounts, folders, Open MPI, constraints",
    RefusalKind.LIMIT: "a limit of its user is reached",
    RefusalKind.ADVICE: "it is expected to end sooner if it waits",
    RefusalKind.POLICY: "its policy is unknown or failed",
}


def describe_timings(name: str, meaning: str, timings: Timings) -> View:
    """Return the table row for one kind of operation: counts since the start, and recent durations in seconds."""
    return {
        "what": name,
        "meaning": meaning,
        "count": timings.count,
        "failures": timings.failures,
        "recent": timings.summarize_recent(),
        # Distribution of all durations since the daemon started
        "spans": spans_of(timings),
    }


def spans_of(timings: Timings) -> list[tuple[str, int]]:
    """Return the number of durations in each bucket, and of those above all buckets."""
    cumulative = [0, *timings.buckets, timings.count]
    labels = [*(f"≤{format_seconds(limit)}" for limit in BUCKETS), f">{format_seconds(BUCKETS[-1])}"]
    return [(label, end - start) for label, (start, end) in zip(labels, pairwise(cumulative), strict=True)]


def parameters_of(rules: Rules) -> list[View]:
    """Return all rules with a default value: name, value, default, and whether the value differs from it."""
    rows = [
        (rule.name, _format_value(getattr(rules, rule.name)), _format_value(rule.default))
        for rule in fields(rules)
        if rule.default is not MISSING
    ]
    return [
        {"name": name, "value": value, "default": default, "is_set": value != default} for name, value, default in rows
    ]


def _in_words(name: str) -> str:
    """Return the name of a class in words: ``Agent connected``."""
    return re.sub(r"(?<=.)[A-Z]", lambda letter: f" {letter[0].lower()}", name)


def _format_value(value: object) -> str:
    """Format the value of a rule: ``yes`` or ``no``, ``none``, or a number such as ``100,000`` or ``0.05``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else format_quantity(value) if isinstance(value, int | float) else str(value)


def failures_of(instruments: Instruments, cluster: ClusterName) -> View:
    """Return a cluster's claims since the daemon started, each of which obtained nodes for a component, and its failed
    claims and attempts by cause, the most frequent first; without failures of programs."""

    def by_cause(failures: Counter[tuple[ClusterName, Any]]) -> dict[str, int]:
        counts = Counter({str(cause): count for (name, cause), count in failures.items() if name == cluster})
        return dict(counts.most_common())

    return {
        "cluster": cluster,
        "claims": instruments.claims[cluster],
        "claims_failed": by_cause(instruments.claims_failed),
        "attempts_failed": by_cause(instruments.attempts_failed),
    }


def add_scheduler(dashboard: Dashboard) -> None:
    """Add the page of the scheduler."""
    engine = dashboard.engine

    @dashboard.page("/scheduler", "scheduler.html", operation="scrape", title="Scheduler", key="s")
    async def scheduler() -> View:
        """Return the scheduler's state, counts and rules."""
        instruments, queries = engine.instruments, engine.queries
        cycles = instruments.cycles
        return {
            "queued": engine.stored_queued,
            "active": engine.stored_active,
            # Events that wait for the next engine cycle
            "waiting": engine.pending_items,
            # Events of the last engine cycle
            "last_round": cycles.waiting,
            "timed": [
                describe_timings(
                    "Cycles", "process events, decide, write to the database, send commands", cycles.total
                ),
                describe_timings("Steps", "the part of a cycle that blocks the event loop", cycles.step),
                describe_timings("Transactions", "database writes of a cycle", instruments.writes),
                describe_timings("Queries", "database reads", instruments.reads),
            ],
            "events": {_in_words(kind): count for kind, count in cycles.events.most_common()},
            "events_refused": cycles.refused,
            "submitted": sum(instruments.submitted.values()),
            "ended": {state: sum(instruments.ended[state, one] for one in Priority) for state in sorted(FINAL_STATES)},
            "requeued": instruments.requeued,
            "preemptions": instruments.preemptions,
            "reclaims": instruments.reclaims,
            # By policy, the jobs that it placed on one and on several clusters
            "placements": {
                policy: (instruments.placements[policy, False], instruments.placements[policy, True])
                for policy in sorted({policy for policy, _ in instruments.placements})
            },
            # Each kind of refusal with its count and its meaning
            "refusals": [(kind, instruments.refusals[kind], meaning) for kind, meaning in REASONS.items()],
            "claims_failed": sum(instruments.claims_failed.values()),
            "claims": [failures_of(instruments, cluster.name) for cluster in queries.grid.clusters()],
            "database_problem": engine.database.problem,
            "database_size": instruments.database_size,
            "epoch": engine.epoch,
            "recent_span": RECENT_SPAN,
            "parameters": parameters_of(queries.rules),
        }
