"""Candidates for a change, in the order of how much they change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from koalapy.model.explanation import ChangeValue
from koalapy.model.job import JobSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change that may or may not do."""

    field: str
    value: ChangeValue
    text: str
    spec: JobSpec


class Steps:
    """A change in steps, from the smallest on: made when looked at, for there may be thousands."""

    def __init__(self, values: Sequence[Any], candidate: Callable[[Any], Candidate]) -> None:
        self._values = values
        self._candidate = candidate

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Candidate:
        return self._candidate(self._values[index])


def one(field: str, value: ChangeValue, text: str, spec: JobSpec) -> Steps:
    """A change without steps."""
    return Steps((spec,), lambda changed: Candidate(field, value, text, changed))
