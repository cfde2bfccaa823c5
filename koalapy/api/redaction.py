"""What everybody may see of a job: how large it is, where, since when, and how it stands; nothing of what it runs."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.model.job import Attempt, Component, Job, JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest

SEEN_BY_ALL: Mapping[type[Any], frozenset[str]] = {
    Job: frozenset({"id", "spec", "state", "attempt", "submitted_at", "placed_at", "started_at", "ended_at"}),
    JobSpec: frozenset({"request", "priority", "home_site", "walltime"}),
    FixedRequest: frozenset({"components"}),
    NonFixedRequest: frozenset({"components"}),
    FlexibleRequest: frozenset({"total_size", "min_component_size", "max_components", "split_options"}),
    ComponentRequest: frozenset({"size", "cluster"}),
    Attempt: frozenset({"generation", "components", "placed_at"}),
    Component: frozenset({"index", "cluster", "size", "state", "replaces", "superseded"}),
}
"""By kind the fields that are shown of others' jobs. Whatever is not listed, a field of tomorrow too, is shown as if
nothing had been said; what has no default must be listed."""


def as_others_see(record: JobRecord) -> JobRecord:
    """A job of somebody else's: also the reason is left out, since it may be words of its program."""
    return JobRecord(_reduced(record.job), "")


def _reduced(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_reduced(each) for each in value)
    if not is_dataclass(value):
        return value
    kind: Any = type(value)
    seen = SEEN_BY_ALL[kind]
    told = {each.name: getattr(value, each.name) for each in fields(value) if each.name in seen}
    return kind(**{name: _reduced(one) for name, one in told.items()})
