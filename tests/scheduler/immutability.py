"""What a scheduler gave out is a value: whatever happens afterwards, it stays as it was."""

from collections import deque
from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from koalapy.model.cluster import GridView
from koalapy.model.job import Attempt, Component, Job

Given = Job | Attempt | GridView
KEPT = 150
"""So many of the last ones are looked at again."""


class GivenOut:
    """The last things that were given out, and what each of them was then."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Given, object]] = deque(maxlen=KEPT)

    def note(self, given: Iterable[Given]) -> None:
        self._kept.extend((each, _frozen(each)) for each in given)

    def check(self) -> None:
        for each, was in self._kept:
            assert _frozen(each) == was, f"what was given out has changed: {each}"


def _frozen(value: object) -> object:
    """What it is now, as something that nothing which happens to it can change."""
    if isinstance(value, GridView):
        clusters = tuple(tuple(getattr(each, field.name) for field in fields(each)) for each in value.clusters)
        orders = tuple(tuple((c.name, c.idle) for c in order) for order in (value.by_idle, value.by_speed))
        return clusters, orders, dict(value.links), dict(value.replicas), value.cut_off, value.usable_idle
    if isinstance(value, Job | Attempt | Component):
        assert is_dataclass(value)
        return tuple(_frozen(getattr(value, field.name)) for field in fields(value))
    return tuple(_frozen(each) for each in value) if isinstance(value, tuple) else value
