"""Check that jobs, attempts and views returned by the scheduler never change afterwards."""

from collections import deque
from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from koalapy.model.cluster import GridView
from koalapy.model.job import Attempt, Component, Job

Value = Job | Attempt | GridView
MAX_SNAPSHOTS = 150


class SnapshotCheck:
    """The values returned most recently, each with a frozen copy."""

    def __init__(self) -> None:
        self._snapshots: deque[tuple[Value, object]] = deque(maxlen=MAX_SNAPSHOTS)

    def add(self, values: Iterable[Value]) -> None:
        self._snapshots.extend((value, _freeze(value)) for value in values)

    def check(self) -> None:
        for value, snapshot in self._snapshots:
            assert _freeze(value) == snapshot, f"a returned value has changed: {value}"


def _freeze(value: object) -> object:
    """Return a nested tuple of a value's fields, independent of later changes."""
    if isinstance(value, GridView):
        clusters = tuple(tuple(getattr(item, field.name) for field in fields(item)) for item in value.clusters)
        orders = tuple(tuple((c.name, c.idle) for c in order) for order in (value.by_idle, value.by_speed))
        return clusters, orders, dict(value.links), dict(value.replicas), value.cut_off, value.usable_idle
    if isinstance(value, Job | Attempt | Component):
        assert is_dataclass(value)
        return tuple(_freeze(getattr(value, field.name)) for field in fields(value))
    return tuple(_freeze(item) for item in value) if isinstance(value, tuple) else value
